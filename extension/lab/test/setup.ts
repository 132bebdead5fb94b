// What lumino needs and jsdom lacks.
Reflect.set(globalThis, 'DragEvent', class extends MouseEvent {});
