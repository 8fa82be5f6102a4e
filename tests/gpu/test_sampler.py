"""The sampler with the kernel of a GPU takes the tokens that it takes without."""

import random
from array import array

import torch

from pagefleet.params import SamplingParams
from pagefleet_kernels.triton_sampling import sample as kernel
from pagefleet_worker.sampling.draw import Draw
from pagefleet_worker.sampling.sampler import sample
from tests.gpu.engines import require_gpu_or_interpreter

require_gpu_or_interpreter()

VOCABULARY = 5000


def random_draw(generator: random.Random, rows: int) -> Draw:
    history = array("i", generator.choices(range(VOCABULARY), k=12))
    mask = generator.randbytes(-(-VOCABULARY // 8)) if generator.random() < 0.3 else None
    params = SamplingParams(
        max_tokens=9,
        seed=generator.randrange(2**64),
        temperature=generator.choice([0.0, 0.5, 1.0, 1.8]),
        top_k=generator.choice([0, 0, 1, 7, 50, VOCABULARY]),
        top_p=generator.choice([1.0, 1.0, 0.2, 0.9]),
        min_p=generator.choice([0.0, 0.0, 0.1]),
        repetition_penalty=generator.choice([1.0, 1.0, 1.3]),
        frequency_penalty=generator.choice([0.0, 0.4]),
        logit_bias={3: 2.0} if generator.random() < 0.2 else {},
        bad_words=((5,),) if generator.random() < 0.2 else (),
    )
    choice, position = generator.randrange(5), generator.randrange(2**31)
    return Draw(generator.randrange(rows), params, history, 4, choice, position, mask)


def test_tokens_are_the_same_with_and_without_the_kernel(
    device: torch.device, generator: random.Random
) -> None:
    torch.manual_seed(generator.randrange(2**31))
    logits = torch.randn(6, VOCABULARY) * 2
    logits[4] = (logits[4] * 2).round() / 2  # equal ones
    logits[5, 17] = torch.nan
    for shaped in (False, True):
        draws = [random_draw(generator, len(logits)) for _ in range(20)]
        draws = [draw for draw in draws if shaped or not draw.is_shaped]
        expected = sample(logits, draws)
        assert sample(logits.to(device), draws, kernel).tolist() == expected.tolist()
    assert -1 in expected
