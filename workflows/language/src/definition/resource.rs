//! The `Resource` of a Task, parsed.

use std::fmt;
use std::sync::Arc;

use super::integrations;
use crate::arn::ActivityArn;

/// The resource that performs a Task's work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resource {
    /// A function's own ARN: it is called with the state's effective input, and its response is the result.
    Function(FunctionArn),
    /// `arn:aws:states:::lambda:invoke`: the arguments contain the function's name and its payload.
    LambdaInvoke(IntegrationPattern),
    /// `arn:aws:states:<region>:<account>:activity:<name>`: a worker polls for the task.
    Activity(ActivityArn),
    /// `arn:aws:states:::states:startExecution`. `parsed_output`: `.sync:2`, whose `Output` is JSON instead of text.
    StartExecution { pattern: IntegrationPattern, parsed_output: bool },
    /// `arn:aws:states:::http:invoke`.
    HttpInvoke,
    /// `arn:aws:states:::job:run`, Mayfly's own: runs a Job in the cluster.
    JobRun(IntegrationPattern),
    /// `arn:aws:states:::mayfly:invoke`, Mayfly's own: an HTTP request to a function, which may wait until the function
    /// accepts it. Asynchronous invocations use it.
    FunctionRequest,
    /// Any other AWS integration. `service` is as written, without `aws-sdk:`.
    Integration {
        service: Arc<str>,
        action: Arc<str>,
        kind: IntegrationKind,
        pattern: IntegrationPattern,
        version: Option<u8>,
    },
    /// An ARN of a service that the States Language's text mentions but AWS never integrated (`arn:aws:swf:…:task:…`),
    /// or a placeholder such as `${Function}` that a deployment replaces. The task fails when it is reached.
    Foreign(Arc<str>),
}

/// AWS's kind of integration of a service, which determines the spelling of arguments, results and errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IntegrationKind {
    /// Written for a few operations of a service (`sqs:sendMessage`).
    Optimised,
    /// Generated from the SDK for Java, for all operations (`aws-sdk:sqs:sendMessage`).
    AwsSdk,
}

/// The end of a Task: the response to the call, the end of the work that the call started, or a report with the task's
/// token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IntegrationPattern {
    RequestResponse,
    Sync,
    WaitForTaskToken,
}

impl fmt::Display for IntegrationPattern {
    /// The suffix of the pattern in a `Resource`, without the dot; `None` for the plain call.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IntegrationPattern::RequestResponse => "",
            IntegrationPattern::Sync => "sync",
            IntegrationPattern::WaitForTaskToken => "waitForTaskToken",
        })
    }
}

/// `arn:<partition>:lambda:<region>:<account>:function:<name>[:<qualifier>]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionArn {
    pub region: Arc<str>,
    pub account: Arc<str>,
    pub name: Arc<str>,
    /// A version, an alias or `$LATEST`.
    pub qualifier: Option<Arc<str>>,
}

/// Why a `Resource` is rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResourceError {
    NotRecognized,
}

impl Resource {
    /// Parses the `Resource` of a definition.
    ///
    /// ```
    /// use mayfly_workflows_language::definition::{IntegrationPattern, Resource};
    /// let resource = Resource::parse("arn:aws:states:::lambda:invoke.waitForTaskToken");
    /// assert_eq!(resource, Ok(Resource::LambdaInvoke(IntegrationPattern::WaitForTaskToken)));
    /// ```
    pub fn parse(text: &str) -> Result<Resource, ResourceError> {
        if is_placeholder(text) {
            return Ok(Resource::Foreign(text.into()));
        }
        let mut parts = text.splitn(6, ':');
        let mut part = || parts.next().ok_or(ResourceError::NotRecognized);
        let (arn, partition, service, region, account) = (part()?, part()?, part()?, part()?, part()?);
        let rest = part()?;
        if arn != "arn" || !(partition == "aws" || partition.starts_with("aws-")) || rest.is_empty() {
            return Err(ResourceError::NotRecognized);
        }
        match service {
            "lambda" => FunctionArn::parse(region, account, rest).map(Resource::Function),
            "states" if region.is_empty() && account.is_empty() => integration(rest),
            "states" => match rest.strip_prefix("activity:") {
                Some(name) if !name.is_empty() && !name.contains(':') => {
                    Ok(Resource::Activity(ActivityArn::from_trusted(text)))
                }
                _ => Err(ResourceError::NotRecognized),
            },
            "swf" if rest.starts_with("task:") => Ok(Resource::Foreign(text.into())),
            _ => Err(ResourceError::NotRecognized),
        }
    }

    /// The pattern of the task. Functions and activities use request-response.
    pub fn pattern(&self) -> IntegrationPattern {
        match self {
            Resource::LambdaInvoke(pattern)
            | Resource::JobRun(pattern)
            | Resource::StartExecution { pattern, .. }
            | Resource::Integration { pattern, .. } => *pattern,
            Resource::Function(_)
            | Resource::Activity(_)
            | Resource::HttpInvoke
            | Resource::FunctionRequest
            | Resource::Foreign(_) => IntegrationPattern::RequestResponse,
        }
    }

    /// `resourceType` and `resource` of the history's task events (`"lambda"`, `"invoke.waitForTaskToken"`); `None` for
    /// functions and activities, which have other events.
    pub fn event_names(&self) -> Option<(String, String)> {
        let named = |service: &str, action: &str, pattern: IntegrationPattern, ending: &str| {
            let dot = if pattern == IntegrationPattern::RequestResponse { "" } else { "." };
            Some((service.to_string(), format!("{action}{dot}{pattern}{ending}")))
        };
        match self {
            Resource::Function(_) | Resource::Activity(_) | Resource::Foreign(_) => None,
            Resource::LambdaInvoke(pattern) => named("lambda", "invoke", *pattern, ""),
            Resource::StartExecution { pattern, parsed_output } => {
                named("states", "startExecution", *pattern, if *parsed_output { ":2" } else { "" })
            }
            Resource::HttpInvoke => named("http", "invoke", IntegrationPattern::RequestResponse, ""),
            Resource::JobRun(pattern) => named("job", "run", *pattern, ""),
            Resource::FunctionRequest => named("mayfly", "invoke", IntegrationPattern::RequestResponse, ""),
            Resource::Integration { service, action, kind, pattern, version } => {
                let service = match kind {
                    IntegrationKind::AwsSdk => format!("aws-sdk:{service}"),
                    IntegrationKind::Optimised => service.to_string(),
                };
                let ending = version.map(|version| format!(":{version}")).unwrap_or_default();
                named(&service, action, *pattern, &ending)
            }
        }
    }

    /// Whether Mayfly implements the resource, including its own API (`aws-sdk:sfn`) and the operations of buckets that
    /// are folders. Other resources are accepted, but fail when they are reached, unless their service is configured
    /// with another endpoint.
    pub fn is_supported(&self) -> bool {
        match self {
            Resource::Integration { service, kind: IntegrationKind::AwsSdk, action, .. } => {
                match &**service {
                    "sfn" => true,
                    "s3" => OF_FOLDERS.contains(&&**action),
                    _ => false,
                }
            }
            Resource::Integration { .. } => false,
            Resource::Foreign(_) => false,
            _ => true,
        }
    }
}

/// `${Name}`: deployment tools replace it before they create the machine.
fn is_placeholder(text: &str) -> bool {
    text.strip_prefix("${").and_then(|rest| rest.strip_suffix('}')).is_some_and(|name| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.:-".contains(c))
    })
}

/// The operations of S3 that are implemented for buckets that are folders.
const OF_FOLDERS: [&str; 12] = [
    "copyObject",
    "createBucket",
    "deleteBucket",
    "deleteObject",
    "deleteObjects",
    "getObject",
    "headBucket",
    "headObject",
    "listBuckets",
    "listObjects",
    "listObjectsV2",
    "putObject",
];

impl FunctionArn {
    fn parse(region: &str, account: &str, rest: &str) -> Result<FunctionArn, ResourceError> {
        let mut parts = rest.split(':');
        let (kind, name, qualifier) = (parts.next(), parts.next(), parts.next());
        let word = |text: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
        };
        let name = name.filter(|name| word(name)).ok_or(ResourceError::NotRecognized)?;
        let sound = qualifier.is_none_or(|qualifier| qualifier == "$LATEST" || word(qualifier));
        if kind != Some("function") || parts.next().is_some() || !sound {
            return Err(ResourceError::NotRecognized);
        }
        Ok(FunctionArn {
            region: region.into(),
            account: account.into(),
            name: name.into(),
            qualifier: qualifier.map(Into::into),
        })
    }
}

/// Parses the part after `arn:aws:states:::`.
fn integration(rest: &str) -> Result<Resource, ResourceError> {
    use IntegrationKind::{AwsSdk, Optimised};
    let (rest, kind) = match rest.strip_prefix("aws-sdk:") {
        Some(rest) => (rest, AwsSdk),
        None => (rest, Optimised),
    };
    let (service, call) = rest.split_once(':').ok_or(ResourceError::NotRecognized)?;
    let (action, ending) =
        call.split_once('.').map_or((call, None), |(action, ending)| (action, Some(ending)));
    let (pattern, version) = match ending {
        None => (IntegrationPattern::RequestResponse, None),
        Some("sync") => (IntegrationPattern::Sync, None),
        Some("sync:2") => (IntegrationPattern::Sync, Some(2)),
        Some("waitForTaskToken") => (IntegrationPattern::WaitForTaskToken, None),
        Some(_) => return Err(ResourceError::NotRecognized),
    };
    let known = match kind {
        AwsSdk => integrations::aws_sdk(service, action) && pattern != IntegrationPattern::Sync,
        Optimised => integrations::optimized(service, action, pattern, version),
    };
    if !known {
        return Err(ResourceError::NotRecognized);
    }
    Ok(match (kind, service, action) {
        (Optimised, "lambda", "invoke") => Resource::LambdaInvoke(pattern),
        (Optimised, "states", "startExecution") => {
            Resource::StartExecution { pattern, parsed_output: version == Some(2) }
        }
        (Optimised, "http", "invoke") => Resource::HttpInvoke,
        (Optimised, "job", "run") => Resource::JobRun(pattern),
        (Optimised, "mayfly", "invoke") => Resource::FunctionRequest,
        _ => Resource::Integration { service: service.into(), action: action.into(), kind, pattern, version },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<Resource> {
        Resource::parse(text).ok()
    }

    #[test]
    fn functions() {
        let function = |qualifier: Option<&str>| {
            Some(Resource::Function(FunctionArn {
                region: "us-east-1".into(),
                account: "123456789012".into(),
                name: "hello".into(),
                qualifier: qualifier.map(Into::into),
            }))
        };
        let arn = "arn:aws:lambda:us-east-1:123456789012:function:hello";
        assert_eq!(parsed(arn), function(None));
        assert_eq!(parsed(&format!("{arn}:$LATEST")), function(Some("$LATEST")));
        assert_eq!(parsed(&format!("{arn}:3")), function(Some("3")));
        for wrong in [":", ":$*#$7485", ":a:b", ":$latest"] {
            assert_eq!(parsed(&format!("{arn}{wrong}")), None, "{wrong}");
        }
        assert_eq!(parsed("arn:aws:lambda:us-east-1:123456789012:layer:hello"), None);
        assert_eq!(parsed("hello"), None);
        assert_eq!(parsed(""), None);
    }

    #[test]
    fn integrations_and_their_patterns() {
        use IntegrationPattern::{RequestResponse, Sync, WaitForTaskToken};
        let states = |rest: &str| parsed(&format!("arn:aws:states:::{rest}"));
        assert_eq!(states("lambda:invoke"), Some(Resource::LambdaInvoke(RequestResponse)));
        assert_eq!(states("lambda:invoke.sync"), None);
        assert_eq!(states("http:invoke"), Some(Resource::HttpInvoke));
        assert_eq!(states("http:invoke.waitForTaskToken"), None);
        assert_eq!(states("job:run.sync"), Some(Resource::JobRun(Sync)));
        assert_eq!(states("mayfly:invoke"), Some(Resource::FunctionRequest));
        assert_eq!(states("mayfly:invoke.sync"), None);
        let start = |pattern, parsed_output| Some(Resource::StartExecution { pattern, parsed_output });
        assert_eq!(states("states:startExecution"), start(RequestResponse, false));
        assert_eq!(states("states:startExecution.sync"), start(Sync, false));
        assert_eq!(states("states:startExecution.sync:2"), start(Sync, true));
        assert_eq!(states("states:startExecution.waitForTaskToken"), start(WaitForTaskToken, false));
        let sns = states("sns:publish.waitForTaskToken").expect("SNS is known");
        assert_eq!((sns.pattern(), sns.is_supported()), (WaitForTaskToken, false));
        assert_eq!(states("sns:publish.sync"), None);
        assert_eq!(states("sns:unpublish"), None);
        let put = states("aws-sdk:s3:putObject").expect("an SDK call");
        assert_eq!(put.event_names(), Some(("aws-sdk:s3".into(), "putObject".into())));
        assert!(put.is_supported());
        assert!(states("aws-sdk:s3:putBucketPolicy").is_some_and(|own| !own.is_supported()));
        assert!(states("aws-sdk:sfn:startExecution").is_some_and(|own| own.is_supported()));
        assert_eq!(states("aws-sdk:nosuchservice:get"), None);
        assert_eq!(states("aws-sdk:s3:PutObject"), None);
        assert_eq!(
            states("states:startExecution.sync:2").and_then(|resource| resource.event_names()),
            Some(("states".into(), "startExecution.sync:2".into()))
        );
    }

    #[test]
    fn activities_and_foreign_tasks() {
        let activity = "arn:aws:states:us-east-1:123456789012:activity:ship-it";
        assert_eq!(parsed(activity), Some(Resource::Activity(ActivityArn::from_trusted(activity))));
        assert_eq!(parsed("arn:aws:states:us-east-1:123456789012:activity:"), None);
        assert_eq!(parsed("arn:aws:states:us-east-1:123456789012:stateMachine:x"), None);
        assert!(matches!(parsed("arn:aws:swf:us-east-1:123456789012:task:X"), Some(Resource::Foreign(_))));
        assert!(matches!(parsed("${Function}"), Some(Resource::Foreign(_))));
        assert_eq!(parsed("${Function"), None);
        assert_eq!(parsed("${}"), None);
    }
}
