//! The service integrations of AWS Step Functions, by name. Mayfly accepts all of them and implements some; AWS rejects
//! those that are not listed.

use super::IntegrationPattern;

/// `service:action` of the optimised integrations, and whether they support `.sync`, `.sync:2` and `.waitForTaskToken`.
/// Source: the developer guide's table of optimised integrations; `job:run` is Mayfly's own.
#[rustfmt::skip]
const OPTIMIZED: &[(&str, &[&str], [bool; 3])] = &[
    // service, actions, [sync, sync:2, waitForTaskToken]
    ("apigateway", &["invoke"], [false, false, true]),
    ("athena", &["startQueryExecution"], [true, false, false]),
    ("athena", &["stopQueryExecution", "getQueryExecution", "getQueryResults"], [false, false, false]),
    ("batch", &["submitJob"], [true, false, true]),
    ("bedrock", &["invokeModel"], [false, false, true]),
    ("bedrock", &["createModelCustomizationJob"], [true, false, false]),
    ("codebuild", &["startBuild", "startBuildBatch"], [true, false, false]),
    ("codebuild", &["stopBuild", "batchDeleteBuilds", "batchGetReports", "stopBuildBatch", "retryBuildBatch", "deleteBuildBatch"], [false, false, false]),
    ("databrew", &["startJobRun"], [true, false, false]),
    ("dynamodb", &["getItem", "putItem", "updateItem", "deleteItem"], [false, false, false]),
    ("ecs", &["runTask"], [true, false, true]),
    ("eks", &["createCluster", "createFargateProfile", "deleteFargateProfile", "createNodegroup", "deleteNodegroup", "deleteCluster", "runJob"], [true, false, false]),
    ("eks", &["call"], [false, false, false]),
    ("elasticmapreduce", &["createCluster", "terminateCluster", "addStep"], [true, false, false]),
    ("elasticmapreduce", &["createCluster"], [true, true, false]),
    ("elasticmapreduce", &["cancelStep", "setClusterTerminationProtection", "modifyInstanceFleetByName", "modifyInstanceGroupByName"], [false, false, false]),
    ("emr-containers", &["createVirtualCluster", "startJobRun"], [true, false, false]),
    ("emr-containers", &["createVirtualCluster", "deleteVirtualCluster", "startJobRun"], [true, false, false]),
    ("emr-serverless", &["createApplication", "startApplication", "stopApplication", "deleteApplication", "startJobRun", "cancelJobRun"], [true, false, false]),
    ("events", &["putEvents"], [false, false, true]),
    ("glue", &["startJobRun"], [true, false, false]),
    ("http", &["invoke"], [false, false, false]),
    ("job", &["run"], [true, false, false]),
    ("lambda", &["invoke"], [false, false, true]),
    ("mayfly", &["invoke"], [false, false, false]),
    ("mediaconvert", &["createJob"], [true, false, false]),
    ("s3", &["getObject", "putObject", "listObjectsV2"], [false, false, false]),
    ("sagemaker", &["createTrainingJob", "createTransformJob", "createHyperParameterTuningJob", "createLabelingJob", "createProcessingJob"], [true, false, false]),
    ("sagemaker", &["createEndpoint", "createEndpointConfig", "createModel", "updateEndpoint"], [false, false, false]),
    ("sns", &["publish"], [false, false, true]),
    ("sqs", &["sendMessage"], [false, false, true]),
    ("states", &["startExecution"], [true, true, true]),
];

/// Whether an optimised integration supports this pattern.
pub(super) fn optimized(
    service: &str,
    action: &str,
    pattern: IntegrationPattern,
    version: Option<u8>,
) -> bool {
    OPTIMIZED.iter().any(|(name, actions, [sync, sync_2, token])| {
        *name == service
            && actions.contains(&action)
            && match (pattern, version) {
                (IntegrationPattern::RequestResponse, _) => true,
                (IntegrationPattern::Sync, None) => *sync,
                (IntegrationPattern::Sync, Some(_)) => *sync_2,
                (IntegrationPattern::WaitForTaskToken, _) => *token,
            }
    })
}

/// Whether this is the form of an AWS SDK integration: a service of AWS, by the SDK for Java's package name, and an
/// action in camel case. The actions of a service are not checked.
pub(super) fn aws_sdk(service: &str, action: &str) -> bool {
    let mut letters = action.chars();
    SDK_SERVICES.contains(&service)
        && letters.next().is_some_and(|first| first.is_ascii_lowercase())
        && letters.all(|letter| letter.is_ascii_alphanumeric())
}

/// The services with AWS SDK integrations, sorted.
#[rustfmt::skip]
const SDK_SERVICES: &[&str] = &[
    "accessanalyzer", "account", "acm", "acmpca", "amp", "amplify", "amplifybackend", "amplifyuibuilder",
    "apigateway", "apigatewayv2", "appconfig", "appconfigdata", "appfabric", "appflow", "appintegrations",
    "applicationautoscaling", "applicationcostprofiler", "applicationdiscovery", "applicationinsights",
    "applicationsignals", "appmesh", "apprunner", "appstream", "appsync", "apptest", "arczonalshift",
    "artifact", "athena", "auditmanager", "autoscaling", "autoscalingplans", "b2bi", "backup",
    "backupgateway", "backupsearch", "backupstorage", "batch", "bcmdataexports", "bedrock", "bedrockagent",
    "bedrockagentcore", "bedrockagentruntime", "bedrockdataautomation", "bedrockdataautomationruntime",
    "bedrockruntime", "billing", "billingconductor", "braket", "budgets", "chatbot", "chime",
    "chimesdkidentity", "chimesdkmediapipelines", "chimesdkmeetings", "chimesdkmessaging", "chimesdkvoice",
    "cleanrooms", "cleanroomsml", "cloud9", "cloudcontrol", "clouddirectory", "cloudformation", "cloudfront",
    "cloudfrontkeyvaluestore", "cloudhsm", "cloudhsmv2", "cloudsearch", "cloudtrail", "cloudtraildata",
    "cloudwatch", "cloudwatchevents", "cloudwatchlogs", "codeartifact", "codebuild", "codecatalyst",
    "codecommit", "codeconnections", "codedeploy", "codeguruprofiler", "codegurureviewer",
    "codegurusecurity", "codepipeline", "codestar", "codestarconnections", "codestarnotifications",
    "cognitoidentity", "cognitoidentityprovider", "cognitosync", "comprehend", "comprehendmedical",
    "computeoptimizer", "config", "connect", "connectcampaigns", "connectcampaignsv2", "connectcases",
    "connectcontactlens", "connectparticipant", "controlcatalog", "controltower", "costandusagereport",
    "costexplorer", "costoptimizationhub", "customerprofiles", "databasemigration", "databrew",
    "dataexchange", "datapipeline", "datasync", "datazone", "dax", "deadline", "detective", "devicefarm",
    "devopsguru", "directconnect", "directory", "directoryservicedata", "dlm", "docdb", "docdbelastic",
    "drs", "dsql", "dynamodb", "dynamodbstreams", "ebs", "ec2", "ec2instanceconnect", "ecr", "ecrpublic",
    "ecs", "efs", "eks", "eksauth", "elasticache", "elasticbeanstalk", "elasticinference",
    "elasticloadbalancing", "elasticloadbalancingv2", "elasticsearch", "elastictranscoder", "emr",
    "emrcontainers", "emrserverless", "entityresolution", "eventbridge", "evidently", "evs", "finspace",
    "finspacedata", "firehose", "fis", "fms", "forecast", "forecastquery", "frauddetector", "freetier",
    "fsx", "gamelift", "gameliftstreams", "geomaps", "geoplaces", "georoutes", "glacier",
    "globalaccelerator", "glue", "grafana", "greengrass", "greengrassv2", "groundstation", "guardduty",
    "health", "healthlake", "honeycode", "iam", "identitystore", "imagebuilder", "inspector", "inspector2",
    "inspectorscan", "internetmonitor", "invoicing", "iot", "iot1clickdevices", "iot1clickprojects",
    "iotanalytics", "iotdataplane", "iotdeviceadvisor", "iotevents", "ioteventsdata", "iotfleethub",
    "iotfleetwise", "iotjobsdataplane", "iotmanagedintegrations", "iotroborunner", "iotsecuretunneling",
    "iotsitewise", "iotthingsgraph", "iottwinmaker", "iotwireless", "ivs", "ivschat", "ivsrealtime",
    "kafka", "kafkaconnect", "kendra", "kendraranking", "keyspaces", "keyspacesstreams", "kinesis",
    "kinesisanalytics", "kinesisanalyticsv2", "kinesisvideo", "kinesisvideoarchivedmedia",
    "kinesisvideomedia", "kinesisvideosignaling", "kinesisvideowebrtcstorage", "kms", "lakeformation",
    "lambda", "launchwizard", "lexmodelbuilding", "lexmodelsv2", "lexruntime", "lexruntimev2",
    "licensemanager", "licensemanagerlinuxsubscriptions", "licensemanagerusersubscriptions", "lightsail",
    "location", "lookoutequipment", "lookoutmetrics", "lookoutvision", "m2", "machinelearning", "macie",
    "macie2", "mailmanager", "managedblockchain", "managedblockchainquery", "marketplaceagreement",
    "marketplacecatalog", "marketplacecommerceanalytics", "marketplacedeployment",
    "marketplaceentitlement", "marketplacemetering", "marketplacereporting", "mediaconnect",
    "mediaconvert", "medialive", "mediapackage", "mediapackagev2", "mediapackagevod", "mediastore",
    "mediastoredata", "mediatailor", "medicalimaging", "memorydb", "mgn", "migrationhub",
    "migrationhubconfig", "migrationhuborchestrator", "migrationhubrefactorspaces",
    "migrationhubstrategy", "mobile", "mpa", "mq", "mturk", "mwaa", "neptune", "neptunedata",
    "neptunegraph", "networkfirewall", "networkflowmonitor", "networkmanager", "networkmonitor", "nimble",
    "notifications", "notificationscontacts", "oam", "observabilityadmin", "omics", "opensearch",
    "opensearchserverless", "opsworks", "opsworkscm", "organizations", "osis", "outposts", "panorama",
    "partnercentralselling", "paymentcryptography", "paymentcryptographydata", "pcaconnectorad",
    "pcaconnectorscep", "pcs", "personalize", "personalizeevents", "personalizeruntime", "pi", "pinpoint",
    "pinpointemail", "pinpointsmsvoice", "pinpointsmsvoicev2", "pipes", "polly", "pricing",
    "privatenetworks", "proton", "qapps", "qbusiness", "qconnect", "qldb", "qldbsession", "quicksight",
    "ram", "rbin", "rds", "rdsdata", "redshift", "redshiftdata", "redshiftserverless", "rekognition",
    "repostspace", "resiliencehub", "resourceexplorer2", "resourcegroups", "resourcegroupstaggingapi",
    "robomaker", "rolesanywhere", "route53", "route53domains", "route53profiles",
    "route53recoverycluster", "route53recoverycontrolconfig", "route53recoveryreadiness",
    "route53resolver", "rum", "s3", "s3control", "s3outposts", "s3tables", "s3vectors", "sagemaker",
    "sagemakera2iruntime", "sagemakeredge", "sagemakerfeaturestoreruntime", "sagemakergeospatial",
    "sagemakermetrics", "sagemakerruntime", "savingsplans", "scheduler", "schemas", "secretsmanager",
    "securityhub", "securityir", "securitylake", "serverlessapplicationrepository", "servicecatalog",
    "servicecatalogappregistry", "servicediscovery", "servicequotas", "ses", "sesv2", "sfn", "shield",
    "signer", "simspaceweaver", "sms", "snowball", "snowdevicemanagement", "sns", "socialmessaging",
    "sqs", "ssm", "ssmcontacts", "ssmguiconnect", "ssmincidents", "ssmquicksetup", "ssmsap", "sso",
    "ssoadmin", "ssooidc", "storagegateway", "sts", "supplychain", "support", "supportapp", "swf",
    "synthetics", "taxsettings", "textract", "timestreaminfluxdb", "timestreamquery", "timestreamwrite",
    "tnb", "transcribe", "transfer", "translate", "trustedadvisor", "verifiedpermissions", "voiceid",
    "vpclattice", "waf", "wafregional", "wafv2", "wellarchitected", "wisdom", "workdocs", "worklink",
    "workmail", "workmailmessageflow", "workspaces", "workspacesinstances", "workspacesthinclient",
    "workspacesweb", "xray",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_services_is_sorted_and_has_no_twins() {
        assert!(SDK_SERVICES.is_sorted_by(|a, b| a < b));
    }
}
