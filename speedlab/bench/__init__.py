"""Side-by-side measurements against the peers, interleaved in one run. `speedlab bench NAME` runs the module of that
name."""

BENCHES = {
    "step": "a training step at every ZeRO stage beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed",
    "recording": "what recording costs of a step",
}
