from lambda_det.training.memory import peak_memory


def test_a_process_with_pytorch_takes_more_than_50_megabytes():
    assert 0.05 < peak_memory("cpu") < 1000
