// What lumino and our views need and jsdom lacks.
Reflect.set(globalThis, 'DragEvent', class extends MouseEvent {});
class Observer {
  observe(): void {}
  disconnect(): void {}
}
Reflect.set(globalThis, 'IntersectionObserver', Observer);
Reflect.set(globalThis, 'ResizeObserver', Observer);
