"""Memory that is in the host between uses."""

import torch

from agentrl.config.schema.training import ActorConfig
from agentrl.workers.actor import Actor
from agentrl.workers.distributed import World
from agentrl.workers.offload import OffloadedMemory, offload_activations
from tests.fakes.training import make_batch, make_policy, random_rows


def test_memory_comes_back_to_every_alias():
    whole = torch.arange(6.0)
    alias, memory = whole[2:], OffloadedMemory(lambda: [whole, whole[1:]])
    with memory.in_use(), memory.in_use():
        assert whole.sum() == 15
    assert not whole.untyped_storage().nbytes()
    with memory.in_use():
        whole.mul_(2)
        assert alias.tolist() == [4, 6, 8, 10]
    with memory.in_use():
        assert alias.tolist() == [4, 6, 8, 10]


def test_moments_are_in_the_host_between_updates(world: World):
    def trained(*, offloads: bool) -> tuple[dict[str, torch.Tensor], Actor]:
        torch.manual_seed(0)
        actor = Actor(make_policy(world), ActorConfig(), total_steps=9, response_budget=16)
        if offloads:
            actor.updater.offload = OffloadedMemory(actor.optimizer.state_tensors)
        for seed in range(2):
            rows = make_batch(random_rows(4, seed=seed))
            rows.batch["old_log_probs"] = torch.zeros_like(rows.batch["advantages"])
            actor.update_policy(rows, temperature=1.0)
        return {n: w.detach().clone() for n, w in actor.policy.named_weights()}, actor

    found, actor = trained(offloads=True)
    moments = actor.optimizer.state_tensors()
    assert moments
    assert not any(one.untyped_storage().nbytes() for one in moments)
    for name, weight in trained(offloads=False)[0].items():
        assert torch.equal(found[name], weight), name


def test_activations_are_copied_and_weights_are_not():
    layer, inputs = torch.nn.Linear(64, 64), torch.randn(3, 64, requires_grad=True)
    with offload_activations():
        outputs = layer(inputs)
    product = outputs.grad_fn
    assert product._saved_mat1.equal(inputs)
    assert product._saved_mat1.data_ptr() != inputs.data_ptr()
    assert product._saved_mat2.data_ptr() == layer.weight.data_ptr()
