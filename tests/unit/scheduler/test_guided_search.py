"""A beam search under a grammar: as many answers as the grammar has texts, and no others."""

from pagefleet.params import Guide, SamplingParams
from pagefleet.wire import Finish
from tests.echo_cell import EchoCell

END = 3


def test_a_grammar_of_two_texts_gives_two_answers() -> None:
    params = SamplingParams(
        max_tokens=9,
        seed=0,
        beam_width=4,
        eos_token_ids=(END,),
        guide=Guide('start: "yes" | "no"'),
    )
    cell = EchoCell()
    cell.join()
    request = cell.submit([*b"Is it?"], params, params.beam_width)
    cell.run()
    client = cell.clients[request]
    texts = [bytes(tokens).removesuffix(bytes([END])) for tokens in client.tokens.values()]
    assert sorted(texts[:2]) == [b"no", b"yes"]
    assert texts[2:] == [b"", b""]
    assert [*client.finished.values()] == [Finish.STOP] * 2 + [Finish.ABORT] * 2
    cell.assert_idle()
