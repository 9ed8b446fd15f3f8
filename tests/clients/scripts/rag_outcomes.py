"""Makes embeddings and rankings with the clients that applications with retrieval use, and writes what each returned.

It runs in an environment of its own and can import nothing of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

TEXTS = ["The river runs over stones.", "The dog sleeps near the water."]
QUERY = "Where does the dog sleep?"
EMBED, RANK = "embed", "rank"


def llama_index_openai(url: str) -> Any:  # Any: JSON, here and below
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    client = OpenAILikeEmbedding(model_name=EMBED, api_base=f"{url}/v1", api_key="unused", max_retries=0)
    return [*client.get_text_embedding_batch(TEXTS), client.get_query_embedding(QUERY)]


def llama_index_ollama(url: str) -> Any:
    from llama_index.embeddings.ollama import OllamaEmbedding

    client = OllamaEmbedding(model_name=EMBED, base_url=url)
    return [*client.get_text_embedding_batch(TEXTS), client.get_query_embedding(QUERY)]


def llama_index_tei(url: str) -> Any:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    client = TextEmbeddingsInference(model_name=EMBED, base_url=url, query_instruction="", text_instruction="")
    return [*client.get_text_embedding_batch(TEXTS), client.get_query_embedding(QUERY)]


def langchain_ollama(url: str) -> Any:
    from langchain_ollama import OllamaEmbeddings

    client = OllamaEmbeddings(model=EMBED, base_url=url)
    return [*client.embed_documents(TEXTS), client.embed_query(QUERY)]


def cohere_rerank(url: str) -> Any:
    import cohere

    found: list[Any] = []
    for client in (cohere.Client("unused", base_url=url), cohere.ClientV2("unused", base_url=url)):
        ranked = client.rerank(model=RANK, query=QUERY, documents=TEXTS, top_n=2)
        found.append([[one.index, one.relevance_score] for one in ranked.results])
    return found


def langchain_cohere(url: str) -> Any:
    from langchain_cohere import CohereRerank

    client = CohereRerank(model=RANK, cohere_api_key="unused", base_url=url, top_n=2)
    return [[[one["index"], one["relevance_score"]] for one in client.rerank(TEXTS, QUERY)]]


def llama_index_jina(url: str) -> Any:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.jinaai_rerank import JinaRerank

    client = JinaRerank(model=RANK, api_key="unused", base_url=f"{url}/v1", top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    ranked = client.postprocess_nodes(nodes, query_str=QUERY)
    return [[[TEXTS.index(one.node.get_content()), one.score] for one in ranked]]


CASES: dict[str, Callable[[str], Any]] = {
    one.__name__: one
    for one in (
        llama_index_openai,
        llama_index_ollama,
        llama_index_tei,
        langchain_ollama,
        cohere_rerank,
        langchain_cohere,
        llama_index_jina,
    )
}


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps([CASES[job["case"]](job["url"])]))
