"""A cell of EchoEngines (`tests.cell`) whose streams are compared with their oracle."""

from array import array
from collections.abc import Sequence

from pagefleet.params import SamplingParams
from pagefleet.wire import Logprobs, unpack_ints
from pagefleet_scheduler.beam import Answer, BeamSearch
from pagefleet_scheduler.decoding import concatenate
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.sampling.sparse_logits import pack_logprobs
from pagefleet_worker.simulated.echo import EchoEngine
from pagefleet_worker.simulated.echo_decoder import (
    Chain,
    EchoDecoder,
    echo_embedding,
    echo_tokens,
    owner_of,
)
from tests.byte_grammars import byte_grammars
from tests.cell import Cell, Client

DECODER = EchoDecoder(200, (3,), byte_grammars(200, (3,)))


def echo_beams(prompt: Sequence[int], params: SamplingParams, salt: bytes = b"") -> list[Answer]:
    """A beam search on the echo model without pages, batches or forks: its oracle."""
    owner = owner_of(salt, params.adapter)
    beams, pieces = [array("i")], [list[Logprobs]()]
    search = BeamSearch(params)
    guided = DECODER.grammars.begin(params.guide) if params.guide else None
    while beams:
        candidates = []
        for beam in beams:
            chain = Chain()
            for position, token in enumerate([*prompt, *beam]):
                chain.append(token, position, owner)
            logits = DECODER.logits(chain.digest())
            mask = guided.mask(beam) if guided else None
            candidates.append(pack_logprobs([logits], [0], params.candidates, mask))
        going = search.advance(beams, pieces, candidates)
        beams = [beams[each.beam] + array("i", [each.token]) for each in going]
        pieces = [[*pieces[each.beam], *filter(None, [each.logprobs])] for each in going]
    return search.answers


class EchoCell(Cell):
    """Workers without weights."""

    def __init__(
        self,
        *,
        blocks: int = 40,
        slots: int = 8,
        budget: int = 32,
        block_size: int = 4,
        host_blocks: int = 0,
        swap_micros: float = 1.0,
        compute_micros: float = 1.0,
        **options: int,
    ) -> None:
        facts = EngineFacts(
            "echo",
            "echo",
            block_size,
            blocks,
            slots,
            200,
            budget,
            200,
            host_blocks,
            swap_micros,
            compute_micros,
        )
        super().__init__(lambda: EchoEngine(facts, DECODER, lambda: None), **options)

    def compare(self) -> None:
        """Every stream is the one of the oracle, whole if it has ended."""
        for client in self.clients.values():
            if client.submit.params.beam_width and client.submit.params.max_tokens:
                self._compare_beams(client)
                continue
            self._compare_embedding(client)
            for choice, tokens in client.tokens.items():
                submit = client.submit
                expected = echo_tokens(
                    DECODER, unpack_ints(submit.prompt), submit.params, choice, submit.salt
                )
                assert tokens == expected.tokens[: len(tokens)], (submit.request, choice)
                if choice in client.finished:
                    assert tokens == expected.tokens
                assert concatenate(client.logprobs[choice]) == concatenate(
                    expected.logprobs[: len(tokens)]
                )

    def _compare_embedding(self, client: Client) -> None:
        submit, dimensions = client.submit, client.submit.params.embedding
        if dimensions is not None and client.finished:
            prompt = unpack_ints(submit.prompt)
            assert client.embedding == echo_embedding(
                prompt, dimensions, submit.salt, submit.params.adapter
            )
        else:
            assert client.embedding is None

    def _compare_beams(self, client: Client) -> None:
        submit = client.submit
        answers = echo_beams(unpack_ints(submit.prompt), submit.params, submit.salt)
        for choice in client.finished:
            assert client.tokens[choice] == list(answers[choice].tokens), submit.request
