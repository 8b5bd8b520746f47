import httpx
import openai
import pytest

from tests.serve.support import EngineDouble, LiveServer


@pytest.fixture
def server():
    with LiveServer(EngineDouble()) as live:
        yield live


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def client(server):
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20
    ) as openai_client:
        yield openai_client
