"""The harness's program: converse with the policy, and compute what it asks for. Needs no package."""

import http.client
import json
import sys
from urllib.parse import urlsplit

endpoint, secret, question, compacts = sys.argv[1:]
address = urlsplit(endpoint)
connection = http.client.HTTPConnection(address.hostname or "", address.port)


def ask(*said: str) -> str:
    """Return the policy's answer to a conversation that the user begins."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    body = {"model": "policy", "messages": messages, "stop": ["?"], "include_stop_str_in_output": True}
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    connection.request("POST", f"{address.path}/chat/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    if reply.status != 200:
        sys.exit(f"the model answers {reply.status}: {text}")
    return str(json.loads(text)["choices"][0]["message"]["content"])


def product(expression: str) -> str:
    """Return the value of "a*b", or "?"."""
    factors = expression.split("*")
    return str(int(factors[0]) * int(factors[1])) if len(factors) == 2 and all(map(str.isdecimal, factors)) else "?"


answer = ask(question)
if answer.endswith("?"):
    result = product(answer[:-1])
    if compacts == "1":
        ask(f"{ask(question, answer, f'{result}#')}=")
    else:
        ask(question, answer, result)
