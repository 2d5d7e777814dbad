"""The training step: accumulation, precision, clipping, and what stops it at numbers like NaN."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from detectron2.structures import Instances
from detectron2.utils import comm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lambda_det.errors import DataError, NonFiniteLossError
from lambda_det.training.loading import BatchesAhead
from lambda_det.training.precision import LossScaler, Precision
from lambda_det.training.settings import Clipping
from tests.distributed.process_group import in_processes
from tests.training.toy import Steps, ToyModel, batches, items, weights


def _train(model, loader, steps, **options):
    return Steps(model, loader, **options).take(range(steps))


def test_accumulation_is_one_large_batch():
    data = items(24)
    large, small = ToyModel(), ToyModel()
    expected = _train(large, batches(data, 8), 3)
    got = _train(small, batches(data, 2), 3, accumulate=4)
    torch.testing.assert_close(weights(small), weights(large), rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights(small), weights(ToyModel()))
    for name in ("total_loss", "loss_fit", "loss_size"):
        a, b = got.history(name).values(), expected.history(name).values()
        assert [i for _, i in a] == [0, 1, 2]
        torch.testing.assert_close([v for v, _ in a], [v for v, _ in b], rtol=1e-5, atol=1e-6)


def test_each_batch_draws_numbers_of_its_own():
    """The numbers do not depend on other batches, other steps or earlier draws."""

    def draws(seed, drawn_before):
        drawn, model = [], ToyModel()
        model.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(()).item()))
        torch.manual_seed(drawn_before)
        _train(model, batches(items(6), 1), 2, accumulate=3, seed=seed)
        return drawn

    found = draws(3, 0)
    assert found == draws(3, 1)
    assert len({*found, *draws(4, 0)}) == 12


def test_bfloat16_on_the_cpu_is_near_float32():
    data = items(8)
    exact, rounded = ToyModel(), ToyModel()
    _train(exact, batches(data, 4), 2)
    _train(rounded, batches(data, 4), 2, precision=Precision("cpu", torch.bfloat16))
    assert all(p.dtype == torch.float32 for p in rounded.parameters())
    difference = (weights(rounded) - weights(exact)).abs().max()
    assert 0 < difference < 0.02


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_bad_number_stops_before_the_weights_change(where):
    data = items(6)
    model = ToyModel()
    before = weights(model)
    if where == "loss":
        data[3]["y"] = torch.tensor(float("nan"))
    else:
        model.layers[0].weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteLossError) as caught:
        _train(model, batches(data, 3), 1, accumulate=2, last_checkpoint=lambda: "run/model_7.pth")
    assert torch.equal(weights(model), before)
    text = str(caught.value)
    assert where in text and "iteration 0" in text and "run/model_7.pth" in text
    assert "loss_fit" in text and "loss_size" in text


def test_a_forward_pass_may_stop_by_itself():
    """As Detectron2's does at its proposals."""

    def stop(module, args):
        raise FloatingPointError("Predicted boxes hold NaN. Training has diverged.")

    model = ToyModel()
    model.register_forward_pre_hook(stop)
    with pytest.raises(NonFiniteLossError, match=r"^Predicted boxes hold NaN at iteration 0;"):
        _train(model, batches(items(2), 2), 1)


def _one_of_two() -> str:
    model, bad = ToyModel(), items(2)
    if comm.get_rank() == 1:
        bad[0]["offset"] = float("inf")  # the gradients stay finite, so rank 0 must be told
    with pytest.raises(NonFiniteLossError) as caught:
        _train(DistributedDataParallel(model), [bad], 1)
    return str(caught.value)


@pytest.mark.slow
def test_two_processes_share_the_verdict(tmp_path):
    """tests/distributed/test_processes.py has that they share the batch."""
    for text in in_processes(_one_of_two, (2,), tmp_path)[2]:
        assert "process 1" in text and "loss_fit inf" in text


CLIP = {
    "value": lambda parameters, most, _: clip_grad_value_(parameters, most),
    "norm": lambda parameters, most, kind: [clip_grad_norm_(p, most, kind) for p in parameters],
    "full_model": clip_grad_norm_,
}


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "loss scaling"])
@pytest.mark.parametrize(
    ("kind", "norm_type"), [("value", 2.0), ("norm", 2.0), ("norm", 1.0), ("full_model", 2.0)]
)
def test_the_sum_of_all_batches_is_clipped_without_its_scale(kind, norm_type, scaled):
    data, most, expected, model = items(8), 0.02, ToyModel(), ToyModel()
    sum(expected(data).values()).backward()
    norm = torch.cat([p.grad.flatten() for p in expected.parameters()]).norm().item()
    CLIP[kind](list(expected.parameters()), most, norm_type)
    assert norm > 10 * most
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clipping = Clipping(kind, most, norm_type)
    steps = Steps(model, batches(data, 2), optimizer, accumulate=4, clipping=clipping)
    steps.grad_scaler = LossScaler("cpu", enabled=scaled)
    storage = steps.take(range(1))
    wanted = torch.cat([p.grad.flatten() for p in expected.parameters()])
    torch.testing.assert_close(weights(ToyModel()) - weights(model), wanted, rtol=1e-4, atol=1e-6)
    # The norm in the log is that of before
    assert storage.history("grad_norm").latest() == pytest.approx(norm, rel=1e-4)


@pytest.fixture
def no_gpu(monkeypatch):
    """Let batches be "copied ahead" to the meta device; the stream of the model, and its memory."""
    now, owners = mock.Mock(), []
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: owners.append((x, stream)))
    return now, owners


def test_batches_are_copied_ahead(no_gpu):
    now, owners = no_gpu
    truth = Instances((2, 3), gt_classes=torch.ones(1))
    loader = [[{"image": torch.zeros(n, 2), "instances": truth, "height": n}] for n in range(3)]
    ahead = BatchesAhead(iter(loader), "meta")
    for number in range(3):
        (record,) = next(ahead)
        assert record["image"].is_meta and record["image"].shape == (number, 2)
        assert record["instances"] is truth and truth.gt_classes.device.type == "cpu"
        assert record["height"] == number
        assert now.wait_stream.call_count == len(owners) == number + 1
        assert owners[-1][0] is record["image"] and owners[-1][1] is now
        ahead.fetch()  # beyond the last there is none
    with pytest.raises(StopIteration):
        next(ahead)


def test_an_error_of_the_batch_ahead_does_not_cost_the_step_before(no_gpu):
    def drawn():
        yield items(2)
        raise DataError("the second")

    model = ToyModel()
    before = weights(model)
    steps = Steps(model, BatchesAhead(drawn(), "cpu"))
    steps.take(range(1))
    assert not torch.equal(weights(model), before)
    with pytest.raises(DataError, match="the second"):
        steps.take(range(1, 2))


def test_the_next_batch_is_fetched_when_the_backward_pass_runs(no_gpu):
    events, model = [], ToyModel()

    def drawn():
        for number in range(5):
            events.append(f"batch {number}")
            yield items(2, seed=number)

    model.layers[0].weight.register_hook(lambda grad: events.append("backward"))
    ahead = BatchesAhead(drawn(), "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: events.append("step"))
    Steps(model, ahead, optimizer, accumulate=2).take(range(2))
    first = ["batch 0", "backward", "batch 1", "backward", "batch 2", "step"]
    assert events == [*first, "backward", "batch 3", "backward", "batch 4", "step"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_batches_arrive_on_a_gpu():
    given = [[{"image": torch.randint(0, 256, (3, 512, 512))}] for _ in range(8)]
    ahead = BatchesAhead(iter(given), "cuda")
    found = []
    for _ in given:
        (record,) = next(ahead)
        assert record["image"].is_cuda
        found.append(record["image"].clone())  # at once: it must wait for the copy
        with torch.cuda.stream(ahead._stream):
            torch.cuda._sleep(10**8)
        torch.cuda._sleep(10**8)
        found.append(record["image"].clone())  # late: the memory must not be another batch's
        del record
        ahead.fetch()
    for batch, *both in zip(given, found[::2], found[1::2], strict=True):
        assert all(torch.equal(image.cpu(), batch[0]["image"]) for image in both)
