"""Defines a function from source and prints its results as JSON. Runs in the sandbox.

Standard input: {"source": ..., "name": ..., "inputs": [[argument, ...], ...]}.
"""

import json
import sys

request = json.load(sys.stdin)
out, sys.stdout = sys.stdout, sys.stderr  # what the function prints is not a result
namespace: dict[str, object] = {}
exec(request["source"], namespace)
function = namespace[request["name"]]
results = [function(*arguments) for arguments in request["inputs"]]  # type: ignore[operator]
json.dump(results, out)
