# Codex CLI: solves the prompt of row.json in its private folder.
TASK=$(python3 -c 'import json; print(json.load(open("row.json"))["prompt"][-1]["content"])')
PROVIDER="{name=\"agentrl\", base_url=\"$OPENAI_BASE_URL\", env_key=\"OPENAI_API_KEY\", wire_api=\"responses\"}"
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy -c model_provider=agentrl -c model_providers.agentrl="$PROVIDER" "$TASK" < /dev/null
