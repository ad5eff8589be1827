"""A LangGraph of two nodes, the model and its tools, with LangChain's OpenAI client."""

import json
import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return f"{a * b:g}"


def make_graph():
    """Build the graph: model, tools, model, until the model calls no tool."""
    model = ChatOpenAI(model=os.environ["OPENAI_MODEL"]).bind_tools([multiply])

    def answer(state: MessagesState):
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", answer)
    graph.add_node("tools", ToolNode([multiply]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        prompt = json.load(file)["prompt"]
    make_graph().invoke({"messages": prompt}, {"recursion_limit": 12})
