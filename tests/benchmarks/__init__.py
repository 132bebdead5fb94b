"""Benchmarks of the repository, next to peers. `python -m tests.benchmarks NAME` runs the module of that name."""

BENCHES = {
    "step": "a training step at every ZeRO stage beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed",
    "states": "held-out loss with 8-bit moments and without float32 masters, over several seeds",
    "recording": "what recording costs of a step",
    "reading": "opening a long run of many ranks, and following it, as a dashboard does",
    "page": "what a page costs: its size, a long run through Jupyter's server, and how soon the first loss is seen",
    "reshaping": "moving a run that is on to another layout",
    "planner": "predicted memory beside the engine's ledger, over a grid of trainings",
    "steptimes": "predicted step times beside measured ones, over the same grid, after calibration",
    "saving": "checkpoints beside a plain write, and what they take of a step's time and memory",
    "start": "from Cluster(n) until its engines are ready, beside what they import",
    "offload": "states on disk of many times the memory that may be used, beside the same training in memory",
    "long": "the longest trainable sequence in a limit on memory, and a step's time, sparse beside dense attention",
    "retrieval": "what sparse attention loses beside dense: answers far back at 16k tokens, and held-out loss",
    "context": "sequences cut over ranks, by a ring and by heads, beside one rank with as many threads",
    "exact": "loss and every gradient of a 64k-token sequence, cut over ranks or sparse, under a limit on memory",
    "network": "training over slow links beside plain ZeRO, and ZeRO beside tensor parallelism and a pipeline (root)",
    "hosts": "clusters of several hosts: start-up, registering, steps, and ways back from failures (root)",
}
