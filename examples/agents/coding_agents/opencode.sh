# OpenCode: solves the prompt of row.json in its private folder.
TASK=$(python3 -c 'import json; print(json.load(open("row.json"))["prompt"][-1]["content"])')
export OPENCODE_CONFIG="${0%/*}/opencode.json"
opencode run "$TASK" < /dev/null
