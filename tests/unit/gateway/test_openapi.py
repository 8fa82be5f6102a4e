"""The document tells of every route, and of bodies what is really taken."""

import json
import re
from typing import Any

import msgspec
import pytest

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.bodies.embedding_body import EmbeddingBody
from pagefleet_gateway.bodies.messages_body import CountBody, MessagesBody
from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.bodies.schema import ChatBody, CompletionBody
from pagefleet_gateway.http.app import build_gateway, routes
from pagefleet_gateway.http.openapi import document
from tests.unit.gateway.served import echo_model

DOCUMENT: Any = json.loads(document())
BODIES = [CompletionBody, ChatBody, ResponseBody, MessagesBody, CountBody, EmbeddingBody]


def test_every_route_is_told_of() -> None:
    gateway = build_gateway(GatewaySettings(), echo_model())
    served = {
        (re.sub(r":path", "", route.path), method.lower())
        for route in routes(gateway)
        for method in (route.methods or ()) - {"HEAD"}
    }
    told = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert told == served


def test_every_reference_leads_somewhere() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    names = set(re.findall(r"#/components/schemas/(\w+)", document().decode()))
    assert names == names & schemas.keys()
    assert {"CompletionBody", "ChatBody", "ErrorBody"} <= names


@pytest.mark.parametrize("body", BODIES)
def test_bodies_are_told_of_field_by_field(body: type[msgspec.Struct]) -> None:
    schema = DOCUMENT["components"]["schemas"][body.__name__]
    assert schema["properties"].keys() == set(body.__struct_encode_fields__)
    deadline = {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400}
    assert deadline in schema["properties"]["timeout"]["anyOf"]


def test_open_routes_need_no_key() -> None:
    open_paths = {
        path
        for path, methods in DOCUMENT["paths"].items()
        if any(method.get("security") == [] for method in methods.values())
    }
    assert open_paths == {"/", "/live", "/ready", "/health"}
