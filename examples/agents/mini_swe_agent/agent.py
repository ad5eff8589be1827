"""mini-swe-agent: the model edits files of the working folder with shell commands."""

import json
import os
import sys

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        task = json.load(file)["prompt"][-1]["content"]
    settings = yaml.safe_load((package_dir / "config" / "mini.yaml").read_text(encoding="utf-8"))
    names = ("system_template", "instance_template")
    agent = DefaultAgent(
        LitellmModel(
            model_name=f"openai/{os.environ['OPENAI_MODEL']}",
            cost_tracking="ignore_errors",
        ),
        LocalEnvironment(),
        **{name: settings["agent"][name] for name in names},
        step_limit=20,
    )
    agent.run(task)
