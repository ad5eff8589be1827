"""The names of verl 0.6.1 that plug-ins import, as a table of agentrl's own.

Each module keeps the path that it has in verl (`verl.tools.base_tool` is
`agentrl.compat.verl.tools.base_tool`). A finder makes it from `MODULES` when it is imported. If the
policy sees verl's behavior (texts of tools and interactions), a small subclass has it; everything
else is agentrl's. `docs/from_verl.md` lists the modules and every difference.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.6.1"
__path__: list[str] = []
"""Marks this module as a package, whose modules the finder makes."""

_PREFIX = f"{__name__}."

MODULES: dict[str, str] = {
    "experimental.agent_loop": (
        "agent_loops: AgentLoopBase AgentLoopOutput AsyncLLMServerManager SingleTurnAgentLoop; "
        "compat.tool_agent_loop: ToolAgentLoop; "
        "compat.agent_loops: get_trajectory_info; trainer.agent_loop_manager: AgentLoopManager "
        "AgentLoopWorker"
    ),
    "experimental.agent_loop.agent_loop": (
        "agent_loops: AgentLoopBase AgentLoopMetrics AgentLoopOutput AsyncLLMServerManager "
        "DictConfigWrap LLMServerClient=AsyncLLMServerManager TokenOutput ToolListWrap "
        "_DummyConfig=DictConfigWrap register; compat.agent_loops: get_trajectory_info; "
        "trainer.agent_loop_manager: AgentLoopManager AgentLoopWorker"
    ),
    "experimental.agent_loop.single_turn_agent_loop": "agent_loops: SingleTurnAgentLoop",
    "experimental.agent_loop.tool_parser": "compat.agent_loops: FunctionCall ToolParser",
    "experimental.agent_loop.utils": (
        "compat.agent_loops: add_generation_prompt_for_gpt_oss build_gpt_oss_tool_response_text "
        "format_gpt_oss_tool_response_manually resolve_config_path"
    ),
    "experimental.agent_loop.tool_agent_loop": (
        "compat.tool_agent_loop: AgentData AgentState ToolAgentLoop"
    ),
    "experimental.dataset.sampler": "compat.data: AbstractCurriculumSampler AbstractSampler",
    "interactions.base": "compat.interactions: BaseInteraction",
    "interactions.gsm8k_interaction": "compat.interactions: Gsm8kInteraction",
    "interactions.weather_interaction": "compat.interactions: WeatherInteraction",
    "interactions.utils.interaction_registry": (
        "compat.interactions: get_interaction_class; interactions: "
        "initialize_interactions_from_config"
    ),
    "protocol": (
        "protocol: DataProto DataProtoItem pad_dataproto_to_divisor unpad_dataproto; "
        "cluster: DataProtoConfig DataProtoFuture; "
        "compat.data: all_gather_data_proto collate_fn=collate_items fold_batch_dim "
        "unfold_batch_dim union_numpy_dict union_tensor_dict"
    ),
    "single_controller.base": "cluster: ClassWithInitArgs ResourcePool Worker WorkerGroup",
    "single_controller.base.decorator": (
        "cluster.dispatch: Dispatch Execute MAGIC_ATTR collect_all_to_all "
        "collect_dp_compute=collect_all_to_all collect_dp_compute_data_proto dispatch_all_to_all "
        "dispatch_dp_compute dispatch_dp_compute_data_proto "
        "dispatch_dp_compute_data_proto_with_func dispatch_one_to_all get_predefined_dispatch_fn "
        "make_nd_compute_dataproto_dispatch_fn register register_dispatch_mode update_dispatch_mode"
    ),
    "single_controller.base.worker": "cluster: Worker",
    "single_controller.base.worker_group": "cluster: ClassWithInitArgs ResourcePool WorkerGroup",
    "single_controller.ray": (
        "cluster: RayClassWithInitArgs RayResourcePool RayWorkerGroup create_colocated_worker_cls "
        "create_colocated_worker_cls_fused"
    ),
    "single_controller.ray.base": (
        "cluster: RayClassWithInitArgs RayResourcePool RayWorkerGroup create_colocated_worker_cls "
        "create_colocated_worker_cls_fused merge_resource_pool"
    ),
    "tools.base_tool": (
        "tools: BaseTool OpenAIFunctionToolSchema ToolResponse; tools.from_verl: rollout_trace_op"
    ),
    "tools.function_tool": (
        "compat.agent_loops: FunctionTool normalize_function_tool_return; tools: function_tool"
    ),
    "tools.geo3k_tool": "compat.tools: Geo3kTool",
    "tools.gsm8k_tool": "compat.tools: Gsm8kTool",
    "tools.image_zoom_in_tool": "compat.tools: ImageZoomInTool",
    "tools.mcp_base_tool": "compat.tools: MCPBaseTool",
    "tools.mcp_search_tool": "compat.tools: MCPSearchTool",
    "tools.sandbox_fusion_tools": (
        "compat.tools: ExecutionPool PoolMode SandboxFusionTool init_execution_pool"
    ),
    "tools.schemas": (
        "compat.tools: OpenAIFunctionCallSchema OpenAIFunctionParsedSchema "
        "OpenAIFunctionToolCall; messages: OpenAIFunctionSchema OpenAIFunctionToolSchema "
        "ToolResponse; tools.from_verl: OpenAIFunctionParametersSchema "
        "OpenAIFunctionPropertySchema"
    ),
    "tools.search_tool": "compat.tools: SearchTool",
    "tools.utils.mcp_clients.McpClientManager": "compat.tools: ClientManager MCPClientManager",
    "tools.utils.search_r1_like_utils": "compat.tools: DEFAULT_TIMEOUT perform_single_search_batch",
    "tools.utils.tool_registry": (
        "compat.tools: get_tool_class; compat.agent_loops: initialize_tools_from_config"
    ),
    "trainer.main_ppo": "compat.data: create_rl_dataset",
    "trainer.ppo.core_algos": (
        "algorithms: *; compat.algorithms: AdvantageEstimator "
        "compute_grpo_vectorized_outcome_advantage compute_policy_loss "
        "compute_rloo_vectorized_outcome_advantage"
    ),
    "trainer.ppo.rollout_corr_helper": (
        "compat.algorithms: compute_offpolicy_metrics compute_rollout_correction_and_rejection_mask"
    ),
    "utils": "compat.tools: hf_processor hf_tokenizer",
    "utils.dataset": "compat.data: RLHFDataset",
    "utils.dataset.rl_dataset": "compat.data: RLHFDataset collate_fn=collate_rows",
    "utils.dataset.vision_utils": ("compat.data: process_image process_video"),
    "utils.model": "compat.data: compute_position_id_with_mask",
    "utils.import_utils": "compat.agent_loops: resolve_config_path",
    "utils.profiler": "compat.agent_loops: simple_timer",
    "utils.profiler.performance": "compat.agent_loops: simple_timer",
    "utils.py_functional": "compat.tools: append_to_dict",
    "utils.ray_utils": "cluster.ray_groups: parallel_put; compat.agent_loops: get_event_loop",
    "utils.reward_score": (
        "compat.scoring: default_compute_score _default_compute_score=default_compute_score"
    ),
    "utils.reward_score.geo3k": (
        "compat.scoring: acc_reward compute_score=score_geo3k format_reward"
    ),
    "utils.reward_score.gsm8k": (
        "compat.scoring: compute_score=score_gsm8k extract_solution=extract_number"
    ),
    "utils.reward_score.math": (
        "compat.scoring: compute_score=score_math is_equiv last_boxed_only_string remove_boxed"
    ),
    "utils.reward_score.math_batch": "compat.scoring: compute_score_batched",
    "utils.reward_score.math_dapo": (
        "compat.scoring: compute_score=score_math_dapo last_boxed_only_string remove_boxed; "
        "answers: normalize_final_answer=normalize_answer"
    ),
    "utils.reward_score.math_reward": (
        "compat.scoring: compute_score=score_math is_equiv last_boxed_only_string remove_boxed"
    ),
    "utils.reward_score.math_verify": "compat.scoring: compute_score=score_math_verify",
    "utils.reward_score.prime_math": "compat.scoring: compute_score=score_math",
    "utils.reward_score.sandbox_fusion.utils": (
        "compat.scoring: _process_single_case=process_single_case"
    ),
    "utils.reward_score.search_r1_like_qa_em": (
        "compat.scoring: compute_score=score_exact_match compute_score_subem=score_contained "
        "em_check; "
        "rewards.qa: extract_solution=find_answer normalize_answer=normalize"
    ),
    "utils.rollout_trace": "compat.tools: rollout_trace_attr; tools.from_verl: rollout_trace_op",
    "utils.tokenizer": "compat.tools: hf_processor hf_tokenizer",
    "utils.torch_functional": "algorithms.masked: masked_mean masked_sum masked_var masked_whiten",
    "workers.config": "compat.algorithms: ActorConfig",
    "workers.config.actor": "compat.algorithms: ActorConfig",
    "workers.rollout.llm_server": "agent_loops: LLMServerClient=AsyncLLMServerManager",
    "workers.rollout.schemas": "messages: Message",
    "workers.rollout.replica": "agent_loops: TokenOutput",
    "workers.reward_manager": (
        "compat.reward_managers: AbstractRewardManager get_reward_manager_cls register; rewards: "
        "BatchRewardManager DAPORewardManager=NaiveRewardManager NaiveRewardManager "
        "PrimeRewardManager"
    ),
    "workers.reward_manager.naive": "rewards: NaiveRewardManager",
    "workers.reward_manager.dapo": "rewards: DAPORewardManager=NaiveRewardManager",
    "workers.reward_manager.prime": "rewards: PrimeRewardManager",
    "workers.reward_manager.batch": "rewards: BatchRewardManager",
    "workers.reward_manager.abstract": "compat.reward_managers: AbstractRewardManager RawRewardFn",
    "workers.reward_manager.registry": (
        "compat.reward_managers: REWARD_MANAGER_REGISTRY get_reward_manager_cls register"
    ),
}
"""verl's modules and their sources: a module of agentrl, then its names
(`*`: all public ones); `theirs=ours` renames one."""


def __getattr__(name: str) -> object:
    if name == "DataProto":  # imports torch
        return import_module("agentrl.protocol").DataProto
    raise AttributeError(f"agentrl's stand-in for verl has no {name!r}")


class _TableFinder(MetaPathFinder, Loader):
    """Makes the modules of the table, and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the table, or a package that holds one.

        Raises:
            ModuleNotFoundError: for a module, or a name of `from module import name`, that is not
                in the table.
        """
        name = fullname.removeprefix(_PREFIX)
        if name == fullname:
            return None
        if name not in MODULES and not any(other.startswith(f"{name}.") for other in MODULES):
            # With the name of the module, `from module import name` would drop this error.
            raise ModuleNotFoundError(
                f"verl.{name}: agentrl's stand-in for verl has no such module or name "
                "(docs/from_verl.md lists those that it has)",
                name="verl",
            )
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Put agentrl's objects under verl's names."""
        for source in filter(
            None, MODULES.get(module.__name__.removeprefix(_PREFIX), "").split("; ")
        ):
            path, names = source.split(": ")
            own = import_module(f"agentrl.{path}")
            for pair in own.__all__ if names == "*" else names.split():
                theirs, _, ours = pair.partition("=")
                setattr(module, theirs, getattr(own, ours or theirs))


sys.meta_path.append(_TableFinder())
