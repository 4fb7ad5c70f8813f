"""The files of PipeDream's profiler: what is read of them, and where a damaged one is refused."""


import pytest
from pipedream_profile import parse_profile

from soapjax.errors import SoapjaxError

PROFILE = """node1 -- Input -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=1.0, parameter_size=0.0
node2 -- Conv2d(3, 64, 3) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=[8.0; 2.0], parameter_size=4.0
node3 -- ReLU -- forward_compute_time=0.5, backward_compute_time=0.5, activation_size=8.0, parameter_size=0.0
\tnode1 -- node2
\tnode2 -- node3"""


def test_a_profile_is_read():
    graph = parse_profile(PROFILE)
    assert graph.names == ("node2 Conv2d(3, 64, 3)", "node3 ReLU")  # loading data is no stage
    assert graph.forward_s.tolist() == [1e-3, 5e-4] and graph.backward_s.tolist() == [2e-3, 5e-4]
    assert graph.activation_bytes.tolist() == [10, 8] and graph.parameter_bytes.tolist() == [4, 0]
    assert graph.edges == ((0, 1),)


@pytest.mark.parametrize(
    "change, message",
    [
        (("=1.0, backward", "=fast, backward"), r"p.txt: line 2: forward_compute_time: got 'fast'"),
        (("=1.0, backward", "=-1, backward"), "line 2: forward_compute_time"),
        (("=1.0, backward", "=nan, backward"), "line 2: forward_compute_time"),
        ((", parameter_size=4.0", ""), "line 2: got no parameter_size"),
        (("node2 -- node3", "node2 -- node9"), "line 5: got node9"),
        (("node2 -- node3", "node2"), "line 5: got 'node2'"),
        (("node3 -- ReLU", "node2 -- ReLU"), "line 3: got node2; expected a name of its own: line 2"),
        (("node2 -- node3", "node2 -- node3\n\tnode3 -- node2"), "cycle through node2, node3"),
        ((PROFILE, ""), "got no layers"),
        ((PROFILE, "hello\n"), "line 1: got 'hello'"),
        ((PROFILE, PROFILE.splitlines()[0]), "only inputs"),
    ],
)
def test_a_malformed_profile_names_the_line(change, message):
    with pytest.raises(SoapjaxError, match=message):
        parse_profile(PROFILE.replace(*change), place="p.txt")
