export default {
    preset: 'ts-jest',
    testEnvironment: 'jsdom',
    modulePathIgnorePatterns: ['<rootDir>/labextension'],
    testMatch: ['<rootDir>/test/**/*.test.ts'],
    transform: { '\\.ts$': ['ts-jest', { tsconfig: 'tsconfig.test.json', diagnostics: false, isolatedModules: true }] },
    testTimeout: 10000
};
