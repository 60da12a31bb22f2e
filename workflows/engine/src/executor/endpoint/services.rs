//! The services that can be spoken to at another endpoint. Sources: their public
//! service models (protocol, target prefix, JSON version, signing name) and the
//! names that Step Functions gives to their errors.

use std::sync::LazyLock;

use super::model::{self, Model};

/// One service.
#[derive(Debug)]
pub(super) struct Service {
    /// As resources spell it; the first is its key.
    pub(super) names: &'static [&'static str],
    pub(super) protocol: Protocol,
    /// Members begin small on the wire (`taskDefinition`); in a workflow they never do.
    pub(super) camel: bool,
    /// The prefix of its errors in `aws-sdk:` integrations.
    pub(super) sdk: &'static str,
    /// Of its optimised integration, where there is one.
    pub(super) optimised: Option<Optimised>,
    pub(super) signing: &'static str,
}

/// The protocol of a service.
#[derive(Debug, Clone, Copy)]
pub(super) enum Protocol {
    /// `POST /` with `X-Amz-Target: <target>.<Operation>` and a JSON body.
    Json { target: &'static str, version: &'static str },
    /// `POST /v1/<operation in small letters>` with a JSON body: AWS Batch.
    Batch,
    /// `POST /2015-03-31/functions/<name>/invocations`.
    Lambda,
    /// Method, path and headers of the operation, and XML bodies: S3.
    RestXml,
    /// `POST /` with a form, answered in XML.
    Query { model: &'static LazyLock<Model>, version: &'static str },
}

/// The form of a service's errors in an optimised integration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Optimised {
    /// `DynamoDB` in `DynamoDB.ResourceNotFoundException`.
    pub(super) prefix: &'static str,
    /// `AmazonDynamoDBv2` in the cause.
    pub(super) service: &'static str,
    /// The name of errors that the service's model lacks.
    pub(super) generic: &'static str,
}

impl Service {
    pub(super) fn key(&self) -> &'static str {
        self.names[0]
    }
}

const fn json(target: &'static str, version: &'static str) -> Protocol {
    Protocol::Json { target, version }
}

const fn optimised(prefix: &'static str, service: &'static str, generic: &'static str) -> Option<Optimised> {
    Some(Optimised { prefix, service, generic })
}

#[rustfmt::skip]
const SERVICES: &[Service] = &[
    Service { names: &["dynamodb"], protocol: json("DynamoDB_20120810", "1.0"), camel: false, sdk: "DynamoDb", signing: "dynamodb",
        optimised: optimised("DynamoDB", "AmazonDynamoDBv2", "AmazonDynamoDBException") },
    Service { names: &["sqs"], protocol: json("AmazonSQS", "1.0"), camel: false, sdk: "Sqs", signing: "sqs",
        optimised: optimised("SQS", "AmazonSQS", "AmazonSQSException") },
    Service { names: &["s3"], protocol: Protocol::RestXml, camel: false, sdk: "S3", signing: "s3", optimised: None },
    Service { names: &["sns"], protocol: Protocol::Query { model: &model::SNS, version: "2010-03-31" }, camel: false, sdk: "Sns", signing: "sns",
        optimised: optimised("SNS", "AmazonSNS", "AmazonSNSException") },
    Service { names: &["events", "eventbridge", "cloudwatchevents"], protocol: json("AWSEvents", "1.1"), camel: false, sdk: "EventBridge", signing: "events",
        optimised: optimised("EventBridge", "AmazonEventBridge", "AmazonEventBridgeException") },
    Service { names: &["ecs"], protocol: json("AmazonEC2ContainerServiceV20141113", "1.1"), camel: true, sdk: "Ecs", signing: "ecs",
        optimised: optimised("ECS", "AmazonECS", "AmazonECSException") },
    Service { names: &["batch"], protocol: Protocol::Batch, camel: true, sdk: "Batch", signing: "batch",
        optimised: optimised("Batch", "AWSBatch", "AWSBatchException") },
    Service { names: &["lambda"], protocol: Protocol::Lambda, camel: false, sdk: "Lambda", signing: "lambda",
        optimised: optimised("Lambda", "AWSLambda", "AWSLambdaException") },
    Service { names: &["glue"], protocol: json("AWSGlue", "1.1"), camel: false, sdk: "Glue", signing: "glue",
        optimised: optimised("Glue", "AWSGlue", "AWSGlueException") },
    Service { names: &["athena"], protocol: json("AmazonAthena", "1.1"), camel: false, sdk: "Athena", signing: "athena",
        optimised: optimised("Athena", "AmazonAthena", "AmazonAthenaException") },
    Service { names: &["codebuild"], protocol: json("CodeBuild_20161006", "1.1"), camel: true, sdk: "CodeBuild", signing: "codebuild",
        optimised: optimised("CodeBuild", "AWSCodeBuild", "AWSCodeBuildException") },
    Service { names: &["sagemaker"], protocol: json("SageMaker", "1.1"), camel: false, sdk: "SageMaker", signing: "sagemaker",
        optimised: optimised("SageMaker", "AmazonSageMaker", "AmazonSageMakerException") },
    Service { names: &["secretsmanager"], protocol: json("secretsmanager", "1.1"), camel: false, sdk: "SecretsManager", signing: "secretsmanager", optimised: None },
    Service { names: &["ssm"], protocol: json("AmazonSSM", "1.1"), camel: false, sdk: "Ssm", signing: "ssm", optimised: None },
    Service { names: &["kinesis"], protocol: json("Kinesis_20131202", "1.1"), camel: false, sdk: "Kinesis", signing: "kinesis", optimised: None },
    Service { names: &["firehose"], protocol: json("Firehose_20150804", "1.1"), camel: false, sdk: "Firehose", signing: "firehose", optimised: None },
    Service { names: &["cloudwatchlogs"], protocol: json("Logs_20140328", "1.1"), camel: true, sdk: "CloudWatchLogs", signing: "logs", optimised: None },
    Service { names: &["kms"], protocol: json("TrentService", "1.1"), camel: false, sdk: "Kms", signing: "kms", optimised: None },
    Service { names: &["ecr"], protocol: json("AmazonEC2ContainerRegistry_V20150921", "1.1"), camel: true, sdk: "Ecr", signing: "ecr", optimised: None },
    Service { names: &["emr", "elasticmapreduce"], protocol: json("ElasticMapReduce", "1.1"), camel: false, sdk: "Emr", signing: "elasticmapreduce", optimised: None },
    Service { names: &["codepipeline"], protocol: json("CodePipeline_20150709", "1.1"), camel: true, sdk: "CodePipeline", signing: "codepipeline", optimised: None },
    Service { names: &["cognitoidentityprovider"], protocol: json("AWSCognitoIdentityProviderService", "1.1"), camel: false, sdk: "CognitoIdentityProvider", signing: "cognito-idp", optimised: None },
];

/// The service of this name.
pub(super) fn named(name: &str) -> Option<&'static Service> {
    SERVICES.iter().find(|service| service.names.contains(&name))
}

/// Every name, for a person.
pub(super) fn all_names() -> String {
    let mut names: Vec<_> = SERVICES.iter().flat_map(|service| service.names.iter().copied()).collect();
    names.sort_unstable();
    names.join(", ")
}
