"""Old names of modules: an import by an old name gives the module with its new name, and a DeprecationWarning.

`from OLD_MODULE import OLD_NAME` works, too, for a class or function that was renamed in a module that moved.

`speedlab/__init__.py` puts a finder at the end of `sys.meta_path`. The finder asks this module only after every other
finder has failed for a name of our packages, so that the table costs nothing while all imports use today's names.

To move a module, add `old:new` to its package below, and its old classes to `_RENAMED`. CONTRIBUTING.md says for how
long an old name is kept.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REMOVED_IN = "0.4"
"""The first version without these names: they are kept for two minor versions, 0.2 and 0.3."""

OLD_PACKAGES = ("speedlab.engine.build", "speedlab.engine.run", "speedlab.engine.step")
"""Packages that no longer exist. They held nothing but modules, so their own import needs no warning."""

_MOVED = {
    "cuda_ops": """
        adam_frozen:.adam_frozen_variance block_sparse_flex:.block_sparse_attention
        block_sparse_kernels:.block_sparse_attention elements:.kernel_math exponential:.kernel_math
        flags:.shared_flags hooks:.torch_compat onebit_take:.onebit processor:.cpu_info products:.onednn_matmul
        meter:.kernel_usage tensors:.tensor_checks threads:.parallel_for torch_attention:.cpu_sdpa
        uncompiled:.torch_compat""",
    "speedlab.bench": """
        attention_cases:.kernel_cases calibrate:speedlab.calibrate.measure
        calibrate_cases:speedlab.calibrate.cases calibrate_ranks:speedlab.calibrate.workers
        flat_cases:.kernel_cases interleave:speedlab.calibrate.interleave loss_cases:.kernel_cases
        ranks:speedlab.calibrate.rank_processes table:speedlab.calibrate.table
        training:speedlab.calibrate.workers""",
    "speedlab.cli": """
        engines:.cluster follow:.progress manage:.cluster resume:.train start:.cluster trace:.export""",
    "speedlab.cluster": """
        agent:.agents.process agent_calls:.agents.rpc agent_launchers:.launch.ipyparallel_launchers
        agent_lobby:.debug.agent_relay agent_muster:.agents.registration agent_runs:.agents.run_files
        agent_tasks:.agents.tasks away:.files.agent_run_dir cells:.worker.cells comparing:.compare_runs
        controller_place:.launch.rendezvous debug_line:.debug.connection debugger:.debug.post_mortem
        debugging:.debug.rank_debugger describing:.errors devices:.launch.placement ending:.shutdown
        engine_environment:.launch.environment engine_process:.worker.process export:.run failures:.errors
        folding:.output_folding given_paths:.start_run going_on:.run_commands handle:.connection
        home:.files.cluster_dir host_rendezvous:.launch.rendezvous host_specs:.launch.host_specs
        hosts:.launch.placement kernel_interrupt:.interrupts launchers:.launch.ipyparallel_launchers
        launching:.launch.backends learning:.learn_from_run live:.run_cell_handle live_cells:.worker.cells
        loads:.worker.utilization
        locks:.files.file_locks nanny:.worker.fork_server nursery:.worker.fork_server_client
        nursery_process:.worker.fork_server out_of_memory:.oom_report own_model:.files.user_model
        pretended:.simulated_link processes:.files.processes ranks_output:.results remote:.worker.remote
        resize:.run_commands roll_call:.agents.registration runs_of:.connection sealed:.files.signed_files
        shapes:.run_commands shipping:.worker.serialization start:.launch.start text_bars:.worker.process
        trial:.start_run wanted:.cluster wires:.worker.abort_connections words:.run_commands""",
    "speedlab.cluster.supervisor": """
        adopted:.journal debug_relay:speedlab.cluster.debug.supervisor_relay hands:.process_control
        hands_on_hosts:.host_process_control holds:.run_locks lost_hosts:.unreachable_hosts messages:.protocol
        next_steps:.recovery ranks:.runs resizing:.resize submissions:.work_queue unreached:.unreachable_hosts
        wire:.record_relay""",
    "speedlab.comm": """
        activity:.rank_activity board:.world calls:.world codecs:.quantized_collectives
        coded:.quantized_collectives compressed:.compressed_allreduce copies:.pinned_copy
        group_limits:.group_timeouts lending:.group lifted_limits:.breakpoint_timeouts limits:.timeouts
        over_hosts:.multi_host_rendezvous pretended:.simulated_link rails:.process_groups
        rotation:.transfers signs:.onebit_allreduce traffic:.transfers transfer:.transfers
        watch:.peer_watchdog wires:.process_groups""",
    "speedlab.comm.shared": """
        calls:.call_descriptions faults:.group_fault hierarchy:.hierarchical joined:.mapped_shards
        meeting:.sync_page memory:.shared_tensors messages:.p2p rounds:.staged_collectives segments:.memfd""",
    "speedlab.comm.transports": """
        choose:.select exchange:.nccl gloo_peers:.gloo in_place:.shared_memory torch_own:.base""",
    "speedlab.config": """
        attention_paths:.attention_report attention_pattern:.attention attention_view:.attention_report
        context:.layout_rules deepspeed_auto:.deepspeed.auto_values deepspeed_keys:.deepspeed.keys
        deepspeed_offload:.deepspeed.convert deepspeed_rules:.deepspeed.convert
        deepspeed_schema:.deepspeed.schema deepspeed_sparse:.deepspeed.sparse_attention
        deepspeed_text:.deepspeed.json_parser deepspeed_trainer:.deepspeed.hf_trainer
        deepspeed_training:.deepspeed.optimizers deepspeed_write:.deepspeed.writer given:.run_config
        in_backward:.validation island_rules:.validation layouts:.layout_rules offload_rules:.validation
        optimizer_rules:.validation options:.command_line part:.base parts:.sections quantized_rules:.validation
        ring_needs:.layout_rules run:.run_config shape:.model_shape text:.serialization updates:.optimizer""",
    "speedlab.data": """
        corpus:.prepare_corpus documents:.packing encode:.encoding epochs:.epoch_sampler files:.sources
        tasks:.synthetic_tasks
        tokens:.token_file""",
    "speedlab.display": """
        bars_svg:.svg extras:.optional_dependencies figure_svg:.svg guides:.documentation
        table:.formatting text:.formatting""",
    "speedlab.engine": """
        deepspeed_names:.deepspeed_api""",
    "speedlab.engine.build": """
        asked_groups:speedlab.optim.factory attention:speedlab.engine.sparse_attention
        balance:speedlab.engine.parallelize contract:speedlab.engine.model_check
        initialize:speedlab.engine.initialize kept_inputs:speedlab.engine.activation_checkpointing
        making:speedlab.engine.model_construction model_parts:speedlab.engine.parallelize
        optimizer_trial:speedlab.optim.optimizer_trial own_kernels:speedlab.engine.kernels
        parameters:speedlab.engine.parallelize placing:speedlab.engine.placement_builder
        plan_module:speedlab.engine.model_check recipe:speedlab.optim.factory
        room:speedlab.engine.placement_builder schedule:speedlab.optim.lr_schedule
        small_states:speedlab.engine.kernels ways:speedlab.engine.placement_builder
        wrap:speedlab.engine.activation_checkpointing""",
    "speedlab.engine.checkpoint": """
        adapters:.peft_adapters agree:.collective_errors architectures:.hf_architectures
        deepspeed:.deepspeed_universal described:.model_description files:.safetensors_files huggingface:.hf
        kept:.optimizer_feedback pieces:.slices random_state:speedlab.engine.rng saving:.async_save
        tensor_file:.safetensors_files transformers_model:.hf_model weights:.single_file""",
    "speedlab.engine.proof": """
        batch_cut:.micro_batch_split forwards:.forward_checks left_as_it_was:.forward_checks on_request:.prover""",
    "speedlab.engine.run": """
        agreement:speedlab.trainer.collective_errors cells:speedlab.trainer.cell_runner
        diagnose:speedlab.trainer.diagnostics first_batch:speedlab.trainer.first_batch_proof
        fitting:speedlab.trainer.fit_check held_runs:speedlab.trainer.run_registry
        holding:speedlab.trainer.fit_check interrupt:speedlab.trainer.interrupts
        live:speedlab.trainer.live_cells loop:speedlab.trainer.trainer reporting:speedlab.trainer.reporting
        reshaping:speedlab.trainer.reshape slow_disk:speedlab.trainer.health supervised:speedlab.trainer.health
        trainer:speedlab.trainer.trainer training:speedlab.trainer.training_run words:speedlab.trainer.commands""",
    "speedlab.engine.step": """
        accumulation:speedlab.engine.gradient_accumulation clock:speedlab.engine.phase_timer
        communicating:speedlab.optim.communicating_protocols counted_targets:speedlab.engine.loss_weights
        drivers:speedlab.engine.drivers entry:speedlab.engine.entry_points errors:speedlab.optim.errors
        evaluation:speedlab.engine.evaluation forms:speedlab.optim.parameter_forms fused:speedlab.optim.fused
        islands:speedlab.optim.diloco lamb:speedlab.optim.lamb late:speedlab.optim.delayed_update
        looking:speedlab.engine.memory_ledger loss_weights:speedlab.engine.loss_weights
        losses:speedlab.engine.loss meeting:speedlab.optim.diloco memory:speedlab.engine.memory_ledger
        memory_marks:speedlab.engine.memory_ledger model_part:speedlab.engine.state
        module_state:speedlab.engine.module_state onebit:speedlab.optim.onebit_adam
        onebit_lamb:speedlab.optim.onebit_lamb optimizer:speedlab.optim.sharded_optimizer
        optimizer_states:speedlab.optim.optimizer_state own_optimizers:speedlab.optim.fused
        parameter_sums:speedlab.optim.lamb pipeline_batches:speedlab.engine.pipeline_batches
        precision:speedlab.engine.precision random_streams:speedlab.engine.rng
        same_data:speedlab.engine.consistency_checks same_gradients:speedlab.engine.consistency_checks
        segments:speedlab.optim.optimizer_state sends_signs:speedlab.optim.sign_compression
        state:speedlab.engine.state step:speedlab.engine.train_step
        to_owners:speedlab.optim.sharded_sign_compression totals:speedlab.engine.step_reduction
        two_phases:speedlab.optim.onebit_adam unseen_writes:speedlab.engine.consistency_checks
        update:speedlab.optim.sharded_update visits:speedlab.optim.offload_fetch
        whole:speedlab.engine.full_state_dict zero_one:speedlab.optim.zero_one_adam
        zero_one_steps:speedlab.optim.zero_one_adam""",
    "speedlab.models": """
        attention_layout:.gpt documents:.packing hugging_face:.hf_attention packed:.hf_attention
        recomputation:.selective_checkpointing tiles:.tiled_mlp""",
    "speedlab.offload": """
        away:.offloaded_tensor buffers:.staging_buffers coded:.low_precision_states coming:.page_pool
        disk:.disk_store host:.host_store jobs:.io_queue kept:.store measure:.disk_benchmark
        memory:.staging_buffers nameless:.anonymous_file room:.file_allocator stores:.store_registry""",
    "speedlab.parallel": """
        changes:.module_patches materialize:.meta_init""",
    "speedlab.parallel.context": """
        context:.context_parallel heads:.ulysses masks:.attention_masks ring:.ring_attention
        sparse_ring:.sparse_ring_attention""",
    "speedlab.parallel.pipeline": """
        cut:.partition hugging_face:.partition timeline:.span_recorder""",
    "speedlab.parallel.tensor": """
        functions:.autograd_collectives gpt:.gpt_plan loss:.vocab_parallel_loss parts:.slicing plans:.tp_plan
        styles:.tp_plan tensor:.tensor_parallel""",
    "speedlab.parallel.zero": """
        flat:.flat_param flat_states:.flat_param functions:.backward_unshard gathers:.all_gather
        hooks:.module_hooks parts:.module_hooks quantized:.parameter reductions:.reduce_scatter refusals:.zero
        saved_tensors:.backward_unshard shown:.param_views slot:.param_slot unit:.units walk:.module_hooks
        ways:.comm_groups""",
    "speedlab.planner": """
        activation_sizes:.memory.activation_sizes activations:.memory.activations
        activations_attention:.memory.attention activations_long:.memory.long_sequences
        activations_stage:.memory.pipeline_stage attention_figure:.report away:.memory.offload
        bubble:.time.step_time calibration_fit:.calibration.fit calibration_learn:.calibration.learn
        calibration_store:.calibration.store caution:.warnings changes:.fit_suggestions
        collectives:.time.communication devices:.hardware.devices disk_rates:.hardware.disk_rates
        efficiency:.time.efficiency formula:.formulas here:.hardware.local hosts:.hardware.hosts
        hugging_face:.hf_config kernels:.time.kernels largest_figure:.largest_model_figure links:.hardware.links
        machine_words:.machine_spec megatron_rules:.memory.megatron_rules nearest:speedlab.display.formatting
        offload_time:.time.offload passing:.memory.buffers peaks:.memory.fit places:.memory.places
        plan_figure:.figures plan_table:.report published_rows:.published.predictions
        published_setups:.published.systems rank_memory:.memory.rank_memory sending:.time.communication
        shapes:.layer_shapes states:.memory.rank_memory subject:.model_spec timing:.time.step_time""",
    "speedlab.telemetry": """
        bars_figure:.figures.lessons beside:.figures.lessons checkpoints:.checkpoint_index columns:.record_store
        compared:.figures.compare compared_drawing:.figures.deltas compared_overview:.figures.overview
        cost_figures:.figures.costs drawing:.figures.deltas exclusive:.run_folder folder:.run_folder
        layout_table:.tables live:.cell_outcomes marks:.figures.markers memory_figure:.figures.memory
        moves_figure:.figures.lessons overview:.figures.overview pipeline_figure:.figures.pipeline
        placement_table:.tables places_figure:.figures.memory plain_file:.run_folder rank_axis:.figures.memory
        rank_records:.record_store series:.history shape:.current_config step_figures:.figures.steps
        step_memory_figure:.figures.steps tail:.file_tail tensorboard:.writer tensors:.tables timeline:.trace""",
    "speedlab_notebook": """
        at_hand:.current commands:.magics.commands compared:.dashboard.widget live_cell:.magics.ranks_magic
        panel_actions:.panel.run_control panel_changes:.panel.changes panel_choice:.panel.controls
        panel_controls:.panel.controls panel_edits:.panel.edits panel_effect:.panel.changes
        panel_export:.panel.search_presets_export panel_fields:.panel.fields panel_finding:.panel.advisor
        panel_form:.panel.form panel_history:.panel.history panel_notes:.panel.changes panel_pages:.panel.form
        panel_presets:.panel.presets panel_reading:.panel.fields panel_reasons:.panel.disabled_reasons
        panel_run:.panel.run_control panel_search:.panel.search panel_start:.panel.train
        panel_states:.panel.prediction panel_tools:.panel.search_presets_export panel_train:.panel.train
        panel_view:.panel.view ranks_cell:.magics.ranks_magic ranks_view:.magics.ranks_magic
        static_picture:.dashboard.static_picture to_pages:.anywidget_assets transcript:.magics.transcript""",
    "speedlab_server": """
        cluster_messages:.schema.clusters cluster_words:.cluster_commands comparing:.figure_socket
        drawing:.figure_socket drawing_messages:.schema.figure_drawing live:.live_socket live_messages:.schema.live
        live_output:.live_socket message:.schema.base messages:.schema output:.rank_output output_messages:.schema.live
        places:.start_cluster problems:.errors reader:.run_reader registry:.run_registry
        run_messages:.schema.runs starts:.start_cluster typescript:.schema.typescript words:.commands""",
}
"""Package → `old:new`: a new name that begins with a dot is in the same package."""

_RENAMED = {
    "speedlab.calibrate.cases": "Sizes:CaseSizes",
    "speedlab.calibrate.table": "Row:BenchRow",
    "speedlab.cli.progress": "Progress:ProgressBar",
    "speedlab.cluster.agents.registration": """
        Muster:AgentRegistration Present:RegisteredEngine Register:EngineWatch RollCall:EngineRegistration""",
    "speedlab.cluster.cluster": "Wanted:ClusterRequest",
    "speedlab.cluster.connection": "Handle:SupervisorConnection RunsOf:ClusterRuns",
    "speedlab.cluster.debug.agent_relay": "Caller:DebugCaller Lobby:DebugRelay",
    "speedlab.cluster.debug.connection": """
        Door:DebugServer Knock:ConnectRequest Line:DebuggerInput Nobody:NoClient Words:DebuggerOutput
        door_path:server_path knock:request_connection lobby_path:relay_path""",
    "speedlab.cluster.debug.supervisor_relay": "Relay:SupervisorDebugRelay",
    "speedlab.cluster.files.cluster_dir": "Home:ClusterDir",
    "speedlab.cluster.files.processes": "name_nursery:name_fork_server nurseries:fork_servers",
    "speedlab.cluster.files.signed_files": "read_sealed:read_signed write_sealed:write_signed",
    "speedlab.cluster.launch.placement": "Place:RankHost places:rank_hosts",
    "speedlab.cluster.run_commands": """
        Pending:CommandFuture take_engines:rebind_engines unsaved_text:unsaved_warning way_on:resume_hint""",
    "speedlab.cluster.supervisor.host_process_control": "OnHosts:RemoteProcesses",
    "speedlab.cluster.supervisor.journal": "Adopted:RecoveredWork Sent:JournalEntry",
    "speedlab.cluster.supervisor.process_control": """
        Hands:ProcessController Here:LocalProcesses Plan:ResizePlan Process:EngineProcess""",
    "speedlab.cluster.supervisor.protocol": """
        AskStanding:GetRunStatus Attend:WakeRun Begin:StartRun Hold:LockRun LetGo:ReleaseRun Listen:SubscribeOutput
        Look:GetRankStatus Message:ProtocolMessage Post:SendCommand Resize:ResizeCluster Said:DisplayMessage
        Standing:RunStatus Watch:ResumeSubmission""",
    "speedlab.cluster.supervisor.record_relay": "Reach:AgentRecords Wire:RecordRelay wire_for:relay_for",
    "speedlab.cluster.supervisor.recovery": "Count:AttemptCount",
    "speedlab.cluster.supervisor.run_locks": "Hold:RunLock Holds:RunLocks",
    "speedlab.cluster.supervisor.runs": "Ranks:RunEngines Run:SupervisedRun Runs:SupervisedRuns Worked:RunSubmission",
    "speedlab.cluster.supervisor.unreachable_hosts": "Unreached:PendingInterrupts",
    "speedlab.cluster.supervisor.work_queue": "Line:WorkQueue",
    "speedlab.cluster.worker.fork_server_client": "Nursery:ForkServer",
    "speedlab.comm.group": "LentBuffers:DoubleBuffer",
    "speedlab.comm.peer_watchdog": "Watch:PeerWatchdog",
    "speedlab.comm.process_groups": """
        Holder:WorkHolder Rails:HierarchicalGroups Wires:ProcessGroups forget_wires:forget_process_groups
        limit_wires:limit_process_groups wires:groups_of_world""",
    "speedlab.comm.shared.mapped_shards": "Joined:MappedShards Memory:MappedArena",
    "speedlab.comm.shared.memfd": "Handle:FileHandle Segment:AnonymousSegment",
    "speedlab.comm.shared.group_fault": "Faults:GroupFault",
    "speedlab.comm.shared.p2p": "Mailbox:P2PMailbox",
    "speedlab.comm.shared.shared_tensors": "Place:TensorAddress Process:PeerProcess",
    "speedlab.comm.shared.staged_collectives": "Rounds:StagedCollectives",
    "speedlab.comm.shared.sync_page": "Meeting:SyncPage Transfer:OfferPurpose",
    "speedlab.comm.simulated_link": "Line:SimulatedLink Message:SimulatedMessage own_line:own_link",
    "speedlab.comm.transfers": "Counted:CommCounts Traffic:CommStats",
    "speedlab.comm.transports.select": "Link:GroupLink",
    "speedlab.comm.world": "Board:StoreMailbox",
    "speedlab.config.base": "Part:ConfigSection",
    "speedlab.config.deepspeed.keys": "Keys:RemainingKeys",
    "speedlab.config.run_config": "GivenConfig:ConfigLike config_of:as_config",
    "speedlab.data.encoding": "Part:TextShare",
    "speedlab.engine.checkpoint.slices": "Block:StridedSlice",
    "speedlab.engine.consistency_checks": """
        SameData:DataConsistencyCheck SameGradients:GradientConsistencyCheck UnseenWrites:UntrackedWriteCheck""",
    "speedlab.engine.full_state_dict": "whole_state:full_state_dict",
    "speedlab.engine.kernels": "OwnKernels:CpuKernelOverrides",
    "speedlab.engine.loss_weights": "Counted:TargetCount",
    "speedlab.engine.memory_ledger": "Looking:MemoryProbe measure_away:measure_offloaded",
    "speedlab.engine.model_check": "try_model:validate_model",
    "speedlab.engine.placement_builder": """
        away_folder:offload_folder residency_of:zero_policy_of ways_of:comm_groups_of""",
    "speedlab.engine.proof.micro_batch_split": "Losses:SplitLosses",
    "speedlab.engine.proof.prover": "Tokenizer:ProofTokenizer",
    "speedlab.engine.step_reduction": "Totals:StepReduction sum_totals:reduce_step",
    "speedlab.engine.train_step": "Step:StepState",
    "speedlab.models.gpt": "Attend:CausalAttention Block:GPTBlock Prediction:LMHead",
    "speedlab.offload.anonymous_file": "NamelessFile:AnonymousFile",
    "speedlab.offload.disk_store": "DiskKept:DiskState",
    "speedlab.offload.file_allocator": "Growing:GrowingFile Room:FileAllocator",
    "speedlab.offload.host_store": "HostKept:HostState",
    "speedlab.offload.io_queue": "Chain:IOQueue Job:IORequest Pool:IOThreadPool",
    "speedlab.offload.low_precision_states": """
        EightBits:EightBitState OnDevice:DeviceState Scratch:DecodeBuffer Widened:UpcastMaster""",
    "speedlab.offload.offloaded_tensor": "AwayState:OffloadedTensor",
    "speedlab.offload.page_pool": "Coming:RepinnableTensor Pages:PagePool",
    "speedlab.offload.staging_buffers": "Buffers:BufferPool Memory:StagedMemory",
    "speedlab.offload.store": "Kept:OffloadedState Store:StateStore",
    "speedlab.offload.store_registry": "Stores:StoreRegistry",
    "speedlab.optim.communicating_protocols": """
        Communicating:CommunicatingOptimizer Exchanged:ExchangedState Prepares:NeedsSetup
        Publishes:ParamSyncOptimizer StepsApart:LocalStepOptimizer""",
    "speedlab.optim.delayed_update": "LateUpdate:DelayedUpdate Twin:OptimizerSnapshot",
    "speedlab.optim.diloco": "Islands:DiLoCo Meeting:OuterStep kept_by_islands:kept_by_diloco",
    "speedlab.optim.factory": "Recipe:OptimizerFactory asked_groups:param_groups_from",
    "speedlab.optim.fused": "Given:UpdateInput LooksAtParameters:LayerwiseOptimizer",
    "speedlab.optim.onebit_adam": "TwoPhases:WarmupThenCompressed",
    "speedlab.optim.optimizer_state": "Segment:MasterSegment",
    "speedlab.optim.optimizer_trial": "Subject:OptimizerMaker",
    "speedlab.optim.parameter_forms": "Forms:ParameterForms Needs:RequiredForms",
    "speedlab.optim.sharded_sign_compression": "ToOwners:ShardedSignCompression",
    "speedlab.optim.sharded_update": "Update:FlatUpdate",
    "speedlab.optim.sign_compression": "SendsSigns:SignCompressedOptimizer",
    "speedlab.optim.zero_one_adam": "Kind:StepKind Steps:StepPolicy",
    "speedlab.parallel.context.attention_masks": "Places:TokenPositions",
    "speedlab.parallel.module_patches": "Change:ModulePatch Changes:ModulePatches",
    "speedlab.parallel.tensor.tp_plan": "Cut:LayerSharding",
    "speedlab.parallel.zero.all_gather": "Gathers:UnshardScheduler",
    "speedlab.parallel.zero.comm_groups": """
        Gathering:AllGather Secondary:SecondaryPartition Waited:PendingWork Ways:ZeroCommGroups""",
    "speedlab.parallel.zero.flat_param": "Flat:FlatParam FlatStates:FlatParamStates",
    "speedlab.parallel.zero.param_slot": "Slot:ParamSlot",
    "speedlab.parallel.zero.param_views": "Shown:ParamViews",
    "speedlab.parallel.zero.parameter": """
        FlatParameter:UnshardedParameter Place:ParameterOwner ReleasedParameter:ReshardedParameter""",
    "speedlab.parallel.zero.reduce_scatter": "Reductions:ReduceScheduler",
    "speedlab.parallel.zero.units": "Pass:UnitPhase Watch:ValueObserver",
    "speedlab.planner.fit_suggestions": "Change:FitChange",
    "speedlab.planner.memory.activation_sizes": "Sizes:ActivationSizes",
    "speedlab.planner.memory.offload": "residency_of:zero_policy_of",
    "speedlab.planner.memory.pipeline_stage": "Pass:MicroBatchMemory",
    "speedlab.planner.memory.places": "Place:PlaceBytes",
    "speedlab.planner.model_spec": "Sizes:ModelSizes Subject:ModelSpec",
    "speedlab.planner.time.kernels": "Pass:KernelSeconds",
    "speedlab.telemetry.figures.compare": "Look:RunStanding",
    "speedlab.telemetry.figures.steps": "Cut:HistoryRange",
    "speedlab.telemetry.cell_outcomes": "Said:CellOutcome",
    "speedlab.telemetry.run_folder": "Command:RunCommand",
    "speedlab.telemetry.trace": "Timeline:PipelineTimeline",
    "speedlab.trainer.cell_runner": "Cells:CellRunner",
    "speedlab.trainer.collective_errors": """
        Bare:ControlGroup Meeting:Reconnectable Parted:RanksDiverged Refusal:CommandRefused""",
    "speedlab.trainer.commands": "Answer:CommandResult Word:CommandSpec carry_out_pending:run_pending_commands",
    "speedlab.trainer.fit_check": "Held:RankCapacity",
    "speedlab_notebook.magics.commands": "Command:MagicCommand",
    "speedlab_notebook.magics.ranks_magic": "Line:RanksLine View:CellView",
    "speedlab_notebook.panel.changes": "Change:PendingChange",
    "speedlab_notebook.panel.controls": "Looks:StyleCache Shown:ShownField",
    "speedlab_notebook.panel.fields": "Kind:ControlKind Reading:FormValues",
    "speedlab_notebook.panel.form": "Page:FormPage",
    "speedlab_notebook.panel.history": "History:UndoHistory",
    "speedlab_notebook.panel.prediction": "Prediction:PanelPrediction",
    "speedlab_notebook.panel.presets": "Preset:PanelPreset",
    "speedlab_notebook.panel.run_control": "Watch:PollingThread",
    "speedlab_notebook.panel.view": "Keys:PanelKeys View:PanelView",
    "speedlab_server.figure_socket": "Easel:FigureSession Looking:PageView Painter:FigureRenderer",
    "speedlab_server.live_socket": "Page:PageConnection Watched:WatchedRun",
    "speedlab_server.run_registry": "Given:ListedCluster",
    "speedlab_server.start_cluster": "Place:PythonEnvironment Starts:ClusterLauncher",
}
"""Module → `old:new` of classes and functions. A module has the old names after it was imported by its own old name."""


def moved_modules() -> dict[str, str]:
    """Return the full old name of each module that moved, with the full new name."""
    pairs = [(package, *pair.split(":")) for package, text in _MOVED.items() for pair in text.split()]
    return {f"{package}.{old}": importlib.util.resolve_name(new, package) for package, old, new in pairs}


def renamed_names(module: str) -> dict[str, str]:
    """Return the old names of a module's classes and functions, with the new ones.

    Args:
        module: The full new name of the module.
    """
    return dict(pair.split(":") for pair in _RENAMED.get(module, "").split())


def find_spec(name: str) -> ModuleSpec | None:
    """Return how to import an old name; None for a name that no module ever had.

    Args:
        name: The full name of a module that no other finder knows.
    """
    if name in OLD_PACKAGES:
        return ModuleSpec(name, _OldPackage(), is_package=True)
    new = moved_modules().get(name)
    return ModuleSpec(name, _MovedModule(new)) if new else None


class _MovedModule(Loader):
    """Loads the module with its new name, and registers that same module under its old name."""

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        text = f"{old} is now {self._new}. The old name will be removed in SpeedLab {REMOVED_IN}."
        # Level 2 is the line with the import: warnings leave out the frames of importlib.
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        # The import system returns what it finds here, so that there is one module and one class of each name.
        sys.modules[old] = new = importlib.import_module(self._new)
        _add_old_names(new)


class _OldPackage(Loader):
    """Makes an empty package, in which no finder but ours finds anything."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        return None


def _add_old_names(module: ModuleType) -> None:
    """Let attribute access find old names of classes and functions. Only code that imports old modules needs that."""
    names = renamed_names(module.__name__)
    if not names or "__getattr__" in vars(module):
        return

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        text = f"{module.__name__}.{name} is now {names[name]}. The old name will be removed in SpeedLab {REMOVED_IN}."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(module, names[name])

    vars(module)["__getattr__"] = find
