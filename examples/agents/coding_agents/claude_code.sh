# Claude Code: solves the prompt of row.json in its private folder.
TASK=$(python3 -c 'import json; print(json.load(open("row.json"))["prompt"][-1]["content"])')
export ANTHROPIC_DEFAULT_HAIKU_MODEL=small CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude -p "$TASK" --model policy --allowedTools Write,Edit,Bash < /dev/null
