//! How people name workflows and executions, and the ARNs that the API knows them by.

use serde_json::json;

use super::client::{ACCOUNT, Client, REGION};
use crate::cli::failure::Failure;

/// A workflow: its name, or its ARN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Workflow(String);

/// An execution: its ARN, `WORKFLOW/EXECUTION`, `WORKFLOW.EXECUTION` as kubectl shows it, or the newest of a workflow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Execution {
    Arn(String),
    Newest(Workflow),
}

impl Workflow {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.starts_with("arn:") && !text.contains(":stateMachine:") {
            return Err("that is not the ARN of a workflow, which has :stateMachine: in it".into());
        }
        match text {
            "" => Err("a workflow has a name".into()),
            text if text.contains('/') => Err("a workflow's name has no slash".into()),
            text => Ok(Self(text.to_owned())),
        }
    }

    pub(super) fn arn(&self) -> String {
        match self.0.starts_with("arn:") {
            true => self.0.clone(),
            false => format!("arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:{}", self.0),
        }
    }

    /// The name without an ARN around it.
    pub(super) fn name(&self) -> &str {
        self.0.split_once(":stateMachine:").map_or(&self.0, |(_, name)| name)
    }

    /// The execution that is meant where there is no such workflow: kubectl shows executions as `WORKFLOW.EXECUTION`,
    /// and either name may have dots.
    pub(super) async fn as_execution(&self, client: &Client) -> anyhow::Result<Option<String>> {
        for arn in self.executions_meant() {
            match client.ask("DescribeExecution", &json!({"executionArn": arn})).await? {
                Ok(_) => return Ok(Some(arn)),
                Err(refused) if refused.name == "ExecutionDoesNotExist" => {}
                Err(refused) => return Err(refused.into()),
            }
        }
        Ok(None)
    }

    /// One for each dot that the name may be cut at.
    fn executions_meant(&self) -> Vec<String> {
        if self.0.starts_with("arn:") {
            return Vec::new();
        }
        let cuts = self.0.match_indices('.').map(|(at, _)| (&self.0[..at], &self.0[at + 1..]));
        let cuts = cuts.filter(|(workflow, name)| !workflow.is_empty() && !name.is_empty());
        cuts.map(|(workflow, name)| execution_arn(workflow, name)).collect()
    }

    /// Says that there is no such workflow.
    pub(super) fn missing(&self) -> anyhow::Error {
        Failure::error(
            format!("there is no workflow {}", self.name()),
            "see what there is: mayfly workflow list",
        )
    }
}

impl Execution {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.starts_with("arn:") {
            return match text.contains(":execution:") || text.contains(":express:") {
                true => Ok(Self::Arn(text.to_owned())),
                false => Workflow::parse(text).map(Self::Newest),
            };
        }
        match text.split_once('/') {
            None => Workflow::parse(text).map(Self::Newest),
            Some(("", _) | (_, "")) => Err("write WORKFLOW/EXECUTION".into()),
            Some((workflow, name)) => Ok(Self::Arn(execution_arn(workflow, name))),
        }
    }

    /// The execution's ARN; the newest is asked for.
    pub(super) async fn arn(&self, client: &Client) -> anyhow::Result<String> {
        let workflow = match self {
            Self::Arn(arn) => return Ok(arn.clone()),
            Self::Newest(workflow) => workflow,
        };
        let params = json!({"stateMachineArn": workflow.arn(), "maxResults": 1});
        let answer = match client.ask("ListExecutions", &params).await? {
            Ok(answer) => answer,
            Err(refused) if refused.name == "StateMachineDoesNotExist" => {
                return workflow.as_execution(client).await?.ok_or_else(|| workflow.missing());
            }
            Err(refused) if refused.name == "StateMachineTypeNotSupported" => {
                return Err(Failure::error(
                    format!("{} is an express workflow: nothing is kept of its executions", workflow.name()),
                    "mayfly workflow start shows their result",
                ));
            }
            Err(refused) => return Err(refused.into()),
        };
        match answer["executions"][0]["executionArn"].as_str() {
            Some(arn) => Ok(arn.to_owned()),
            None => Err(Failure::error(
                format!("workflow {} was never started", workflow.name()),
                format!("start it: mayfly workflow start {} -d JSON", workflow.name()),
            )),
        }
    }
}

fn execution_arn(workflow: &str, name: &str) -> String {
    format!("arn:aws:states:{REGION}:{ACCOUNT}:execution:{workflow}:{name}")
}

/// `WORKFLOW/EXECUTION` of an execution's ARN.
pub(super) fn short(arn: &str) -> String {
    match arn.split_once(":execution:").or_else(|| arn.split_once(":express:")) {
        Some((_, name)) => name.replacen(':', "/", 1),
        None => arn.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: &str = "arn:aws:states:us-east-1:000000000000:stateMachine:m";
    const RUN: &str = "arn:aws:states:us-east-1:000000000000:execution:m:e";

    #[test]
    fn workflows() {
        for text in ["m", MACHINE] {
            let workflow = Workflow::parse(text).unwrap();
            assert_eq!((workflow.arn().as_str(), workflow.name()), (MACHINE, "m"));
        }
        for bad in ["", "a/b", RUN] {
            assert!(Workflow::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_name_with_dots_may_be_an_executions() {
        let meant = |text: &str| Workflow::parse(text).unwrap().executions_meant();
        assert_eq!(meant("m.e"), [RUN]);
        let arn = |rest: &str| format!("arn:aws:states:us-east-1:000000000000:execution:{rest}");
        assert_eq!(meant("m.v2.e"), [arn("m:v2.e"), arn("m.v2:e")]);
        for none in ["m", ".e", "m.", MACHINE] {
            assert!(meant(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn executions() {
        let newest = |text: &str| Execution::Newest(Workflow(text.into()));
        for (text, expected) in [
            ("m/e", Execution::Arn(RUN.into())),
            (RUN, Execution::Arn(RUN.into())),
            ("m", newest("m")),
            (MACHINE, newest(MACHINE)),
        ] {
            assert_eq!(Execution::parse(text).unwrap(), expected);
        }
        for bad in ["", "/", "m/", "/e", "arn:aws:s3:::x"] {
            assert!(Execution::parse(bad).is_err(), "{bad:?}");
        }
        assert_eq!(short(RUN), "m/e");
        assert_eq!(short("x"), "x");
    }
}
