//! The names of workflows and executions on the command line, and their ARNs.

use mayfly_api::{
    ObjectKey,
    wellknown::NAMESPACE_DEFAULT,
    workflow::names::{EXECUTION_PREFIX, STATE_MACHINE_PREFIX, state_machine_name},
};
use serde_json::json;

use super::client::Client;
use crate::failure::{ErrorCode, Failure};

/// A workflow: its name, or its ARN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Workflow(String);

/// An execution: its ARN, `WORKFLOW/EXECUTION`, `WORKFLOW.EXECUTION` as shown by kubectl, or the newest of a workflow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Execution {
    Arn(String),
    Named(Workflow, String),
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

    /// The workflow with this name in a namespace: `order` is the state machine `shop.order` in `shop`. Names with a
    /// dot and ARNs already contain their namespace.
    pub(super) fn within(self, namespace: &str) -> Self {
        // Dots in an alias are not significant: `order:v1.2`.
        let name = self.0.split(':').next().unwrap_or_default();
        match self.0.starts_with("arn:") || name.contains('.') {
            true => self,
            false => Self(state_machine_name(&ObjectKey::new(namespace, &self.0))),
        }
    }

    /// The name of its object in a namespace other than `default`, if its name starts with the namespace.
    pub(super) fn object_within(&self, namespace: &str) -> Option<&str> {
        match namespace == NAMESPACE_DEFAULT || self.0.starts_with("arn:") {
            true => None,
            false => self.0.strip_prefix(namespace)?.strip_prefix('.'),
        }
    }

    pub(super) fn arn(&self) -> String {
        match self.0.starts_with("arn:") {
            true => self.0.clone(),
            false => format!("{STATE_MACHINE_PREFIX}{}", self.0),
        }
    }

    /// The name, without an ARN around it.
    pub(super) fn name(&self) -> &str {
        self.0.split_once(":stateMachine:").map_or(&self.0, |(_, name)| name)
    }

    /// The ARN of an execution with this name, if there is no such workflow: kubectl shows executions as
    /// `WORKFLOW.EXECUTION`, and either name may contain dots.
    pub(super) async fn as_execution(&self, client: &Client) -> anyhow::Result<Option<String>> {
        for arn in self.executions_meant(client.namespace()) {
            match client.try_call("DescribeExecution", &json!({"executionArn": arn})).await? {
                Ok(_) => return Ok(Some(arn)),
                Err(refused) if refused.name == "ExecutionDoesNotExist" => {}
                Err(refused) => return Err(refused.into()),
            }
        }
        Ok(None)
    }

    /// Two candidates for each dot at which the name may be split: kubectl omits the namespace, and the API includes
    /// it. In `default` both are the same.
    fn executions_meant(&self, namespace: &str) -> Vec<String> {
        if self.0.starts_with("arn:") {
            return Vec::new();
        }
        let cuts = self.0.match_indices('.').map(|(at, _)| (&self.0[..at], &self.0[at + 1..]));
        let cuts = cuts.filter(|(workflow, name)| !workflow.is_empty() && !name.is_empty());
        let mut arns = Vec::new();
        for (workflow, name) in cuts {
            let within = Self(workflow.to_owned()).within(namespace);
            arns.extend([within.execution(name), execution_arn(workflow, name)]);
        }
        arns.dedup();
        arns
    }

    fn execution(&self, name: &str) -> String {
        execution_arn(&self.0, name)
    }

    /// The error that there is no such workflow.
    pub(super) fn missing(&self) -> anyhow::Error {
        Failure::error(
            ErrorCode::NotFound,
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
            Some((workflow, name)) => Ok(Self::Named(Workflow::parse(workflow)?, name.to_owned())),
        }
    }

    /// The execution with this name in a namespace (see [`Workflow::within`]).
    pub(super) fn within(self, namespace: &str) -> Self {
        match self {
            Self::Arn(arn) => Self::Arn(arn),
            Self::Named(workflow, name) => Self::Arn(workflow.within(namespace).execution(&name)),
            Self::Newest(workflow) => Self::Newest(workflow.within(namespace)),
        }
    }

    /// The execution's ARN; without a name, the ARN of the newest execution.
    pub(super) async fn arn(&self, client: &Client) -> anyhow::Result<String> {
        let workflow = match self {
            Self::Arn(arn) => return Ok(arn.clone()),
            Self::Named(workflow, name) => return Ok(workflow.execution(name)),
            Self::Newest(workflow) => workflow,
        };
        let params = json!({"stateMachineArn": workflow.arn(), "maxResults": 1});
        let answer = match client.try_call("ListExecutions", &params).await? {
            Ok(answer) => answer,
            Err(refused) if refused.name == "StateMachineDoesNotExist" => {
                return workflow.as_execution(client).await?.ok_or_else(|| workflow.missing());
            }
            Err(refused) if refused.name == "StateMachineTypeNotSupported" => {
                return Err(Failure::error(
                    ErrorCode::Usage,
                    format!("{} is an express workflow, whose executions are not stored", workflow.name()),
                    "mayfly workflow start shows their result",
                ));
            }
            Err(refused) => return Err(refused.into()),
        };
        match answer["executions"][0]["executionArn"].as_str() {
            Some(arn) => Ok(arn.to_owned()),
            None => Err(Failure::error(
                ErrorCode::NotFound,
                format!("workflow {} has no executions", workflow.name()),
                format!("start it: mayfly workflow start {} -d JSON", workflow.name()),
            )),
        }
    }
}

fn execution_arn(workflow: &str, name: &str) -> String {
    format!("{EXECUTION_PREFIX}{workflow}:{name}")
}

/// The short form `WORKFLOW/EXECUTION` of an execution's ARN.
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
        let within = |namespace: &str, text: &str| Workflow::parse(text).unwrap().executions_meant(namespace);
        let meant = |text: &str| within("default", text);
        assert_eq!(meant("m.e"), [RUN]);
        let arn = |rest: &str| format!("arn:aws:states:us-east-1:000000000000:execution:{rest}");
        assert_eq!(meant("m.v2.e"), [arn("m:v2.e"), arn("m.v2:e")]);
        assert_eq!(within("shop", "m.e"), [arn("shop.m:e"), arn("m:e")]);
        for none in ["m", ".e", "m.", MACHINE] {
            assert!(meant(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn plain_names_stand_in_a_namespace() {
        let name =
            |text: &str, namespace: &str| Workflow::parse(text).unwrap().within(namespace).name().to_owned();
        for (text, namespace, expected) in [
            ("m", "default", "m"),
            ("m", "shop", "shop.m"),
            ("m:v1.2", "shop", "shop.m:v1.2"),
            ("other.m", "shop", "other.m"),
            (MACHINE, "shop", "m"),
        ] {
            assert_eq!(name(text, namespace), expected, "{text} in {namespace}");
        }
        let execution = |text: &str| Execution::parse(text).unwrap().within("shop");
        let arn =
            |rest: &str| Execution::Arn(format!("arn:aws:states:us-east-1:000000000000:execution:{rest}"));
        assert_eq!(execution("m/e"), arn("shop.m:e"));
        assert_eq!(execution("other.m/e"), arn("other.m:e"));
        assert_eq!(execution(RUN), arn("m:e"));
        assert_eq!(execution("m"), Execution::Newest(Workflow("shop.m".into())));
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
            assert_eq!(Execution::parse(text).unwrap().within("default"), expected);
        }
        for bad in ["", "/", "m/", "/e", "arn:aws:s3:::x"] {
            assert!(Execution::parse(bad).is_err(), "{bad:?}");
        }
        assert_eq!(short(RUN), "m/e");
        assert_eq!(short("x"), "x");
    }
}
