export default {
    preset: 'ts-jest',
    testEnvironment: 'jsdom',
    setupFiles: ['<rootDir>/test/setup.ts'],
    modulePathIgnorePatterns: ['<rootDir>/labextension'],
    testMatch: ['<rootDir>/test/**/*.test.ts'],
    transform: { '\\.ts$': ['ts-jest', { tsconfig: 'tsconfig.test.json', diagnostics: false, isolatedModules: true }] },
    testTimeout: 10000
};
