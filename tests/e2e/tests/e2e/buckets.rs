//! Buckets in workflows: the same tasks and maps on folders and on an S3 service.

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{Start, Up};
use serde_json::{Value, json};

use crate::endpoints::task;
use crate::stand_in_s3::{self, ENDLESS, KEY, KEY_ID, StandIn};
use crate::workflows::{create, ended, start};

async fn over_s3(s3: &StandIn, key: &str) -> Result<Up> {
    Start::default()
        .with(&["--task-endpoint", &format!("s3={}", s3.url)])
        .environment("AWS_ACCESS_KEY_ID", KEY_ID)
        .environment("AWS_SECRET_ACCESS_KEY", key)
        .environment("AWS_REGION", "eu-west-1")
        .ready()
        .await
}

/// Tasks of `aws-sdk:s3`, numbered, because each has its own state machine.
struct Tasks<'a> {
    up: &'a Up,
    count: usize,
}

impl Tasks<'_> {
    async fn run(&mut self, action: &str, arguments: Value) -> Result<Result<Value, (String, String)>> {
        self.count += 1;
        let resource = format!("arn:aws:states:::aws-sdk:s3:{action}");
        task(self.up, &format!("t{}", self.count), &resource, arguments).await
    }

    async fn ok(&mut self, action: &str, arguments: Value) -> Result<Value> {
        self.run(action, arguments)
            .await?
            .map_err(|(name, cause)| anyhow::anyhow!("{action}: {name}: {cause}"))
    }

    async fn refused(&mut self, action: &str, arguments: Value, name: &str, words: &str) -> Result<()> {
        let told = self.run(action, arguments).await?;
        let (error, cause) = told.err().with_context(|| format!("{action} succeeded, not {name}"))?;
        ensure!(error == name && cause.contains(words), "{action}: {error}: {cause}");
        Ok(())
    }
}

async fn objects_and_buckets(up: &Up) -> Result<()> {
    let mut tasks = Tasks { up, count: 0 };
    let made = tasks.ok("createBucket", json!({"Bucket": "suite"})).await?;
    ensure!(made == json!({"Location": "/suite"}), "{made}");
    let twice = "S3.BucketAlreadyOwnedByYouException";
    tasks.refused("createBucket", json!({"Bucket": "suite"}), twice, "Status Code: 409").await?;
    tasks.ok("headBucket", json!({"Bucket": "suite"})).await?;
    let nowhere = "S3.NoSuchBucketException";
    tasks
        .refused("headBucket", json!({"Bucket": "none"}), nowhere, "null (Service: S3, Status Code: 404")
        .await?;
    let key = "a b/ä+1.json";
    let put = tasks.ok("putObject", json!({"Bucket": "suite", "Key": key, "Body": {"n": [1]}})).await?;
    let etag = put["ETag"].as_str().unwrap_or_default().to_owned();
    ensure!(etag.starts_with('"') && etag.ends_with('"'), "{put}");
    let words = "The specified bucket does not exist (Service: S3, Status Code: 404, Request ID: ";
    tasks.refused("putObject", json!({"Bucket": "none", "Key": "k"}), nowhere, words).await?;
    let got = tasks.ok("getObject", json!({"Bucket": "suite", "Key": key})).await?;
    let time = got["LastModified"].as_str().unwrap_or_default().to_owned();
    ensure!(time.len() == "2024-02-01T10:00:00Z".len() && time.ends_with('Z'), "{got}");
    let head = json!({"AcceptRanges": "bytes", "ContentLength": 9, "ContentType": "binary/octet-stream",
        "ETag": etag, "LastModified": time, "Metadata": {}});
    let mut whole = head.clone();
    whole["Body"] = json!("{\"n\":[1]}");
    ensure!(got == whole, "{got}");
    let seen = tasks.ok("headObject", json!({"Bucket": "suite", "Key": key})).await?;
    ensure!(seen == head, "{seen}");
    let missing = "S3.NoSuchKeyException";
    let words = "The specified key does not exist. (Service: S3, Status Code: 404, Request ID: ";
    tasks.refused("getObject", json!({"Bucket": "suite", "Key": "none"}), missing, words).await?;
    tasks
        .refused("headObject", json!({"Bucket": "suite", "Key": "none"}), missing, "null (Service: S3")
        .await?;
    let source = "suite/a%20b/%C3%A4%2B1.json";
    let copied = json!({"Bucket": "suite", "Key": "copy", "CopySource": source});
    let copied = tasks.ok("copyObject", copied).await?;
    ensure!(copied["CopyObjectResult"]["ETag"].is_string(), "{copied}");
    let gone = json!({"Bucket": "suite", "Key": "x", "CopySource": "suite/none"});
    tasks.refused("copyObject", gone, missing, "does not exist").await?;
    let copy = tasks.ok("getObject", json!({"Bucket": "suite", "Key": "copy"})).await?;
    ensure!(copy["Body"] == got["Body"], "{copy}");
    listings(&mut tasks, key).await?;
    tasks
        .refused("deleteBucket", json!({"Bucket": "suite"}), "S3.S3Exception", "is not empty (Service")
        .await?;
    let wanted = json!({"Bucket": "suite", "Delete": {"Objects": [{"Key": "copy"}, {"Key": "none"}]}});
    let deleted = tasks.ok("deleteObjects", wanted).await?;
    ensure!(deleted == json!({"Deleted": [{"Key": "copy"}, {"Key": "none"}]}), "{deleted}");
    for _ in 0..2 {
        let deleted = tasks.ok("deleteObject", json!({"Bucket": "suite", "Key": key})).await?;
        ensure!(deleted == json!({}), "{deleted}");
    }
    tasks.ok("deleteBucket", json!({"Bucket": "suite"})).await?;
    tasks.refused("deleteObject", json!({"Bucket": "suite", "Key": key}), nowhere, "does not exist").await?;
    let runtime = "States.Runtime";
    tasks.refused("getObject", json!({"Bucket": "b"}), runtime, "'Key' is required").await?;
    tasks.refused("getObject", json!({"Bucket": "b", "Key": "k", "Kee": 1}), runtime, "'Kee'").await?;
    let unknown = "Mayfly.IntegrationNotSupported";
    tasks.refused("getBucketPolicy", json!({"Bucket": "b"}), unknown, "getObject").await
}

async fn listings(tasks: &mut Tasks<'_>, key: &str) -> Result<()> {
    let keys = |told: &Value| {
        let all = told["Contents"].as_array().into_iter().flatten();
        all.filter_map(|entry| entry["Key"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    let mut all = tasks.ok("listObjectsV2", json!({"Bucket": "suite"})).await?;
    ensure!(keys(&all) == [key, "copy"], "{all}");
    ensure!(all["Contents"][1]["Size"] == 9 && all["Contents"][1]["StorageClass"] == "STANDARD", "{all}");
    all.as_object_mut().context("no object")?.remove("Contents");
    let rest = json!({"IsTruncated": false, "KeyCount": 2, "MaxKeys": 1000, "Name": "suite", "Prefix": ""});
    ensure!(all == rest, "{all}");
    let first = tasks.ok("listObjectsV2", json!({"Bucket": "suite", "MaxKeys": 1})).await?;
    ensure!(keys(&first) == [key] && first["IsTruncated"] == true, "{first}");
    let next = json!({"Bucket": "suite", "ContinuationToken": first["NextContinuationToken"]});
    let second = tasks.ok("listObjectsV2", next).await?;
    ensure!(keys(&second) == ["copy"] && second["IsTruncated"] == false, "{second}");
    let folded = tasks.ok("listObjectsV2", json!({"Bucket": "suite", "Delimiter": "/"})).await?;
    ensure!(keys(&folded) == ["copy"] && folded["CommonPrefixes"] == json!([{"Prefix": "a b/"}]), "{folded}");
    let none = tasks.ok("listObjectsV2", json!({"Bucket": "suite", "Prefix": "zzz"})).await?;
    ensure!(none.get("Contents").is_none() && none["KeyCount"] == 0, "{none}");
    let old = tasks.ok("listObjects", json!({"Bucket": "suite", "Prefix": "c"})).await?;
    ensure!(keys(&old) == ["copy"] && old["Marker"] == "" && old.get("KeyCount").is_none(), "{old}");
    let nowhere = "S3.NoSuchBucketException";
    tasks.refused("listObjectsV2", json!({"Bucket": "none"}), nowhere, "does not exist").await?;
    let buckets = tasks.ok("listBuckets", json!({})).await?;
    ensure!(
        buckets["Buckets"][0]["Name"] == "suite" && buckets["Buckets"][0]["CreationDate"].is_string(),
        "{buckets}"
    );
    Ok(())
}

/// A distributed Map that passes its items through.
fn map(reader: Value, more: Value) -> Value {
    let mut state = json!({"Type": "Map", "End": true, "ItemReader": reader,
        "ItemProcessor": {"ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
            "StartAt": "P", "States": {"P": {"Type": "Pass", "End": true}}}});
    if let (Some(state), Some(more)) = (state.as_object_mut(), more.as_object()) {
        state.extend(more.clone());
    }
    json!({"StartAt": "M", "States": {"M": state}})
}

fn object(key: &str, config: Value) -> Value {
    json!({"Resource": "arn:aws:states:::s3:getObject", "ReaderConfig": config,
        "Parameters": {"Bucket": "maps", "Key": key}})
}

async fn run(up: &Up, name: &str, definition: Value) -> Result<Result<Value, (String, String)>> {
    let machine = create(up, name, "STANDARD", definition).await?;
    let told = ended(up, &start(up, &machine, json!({})).await?).await?;
    let text = |name: &str| told[name].as_str().unwrap_or_default().to_owned();
    Ok(match told["status"] == "SUCCEEDED" {
        true => Ok(serde_json::from_str(&text("output"))?),
        false => Err((text("error"), text("cause"))),
    })
}

async fn items_and_results(up: &Up) -> Result<()> {
    let mut tasks = Tasks { up, count: 100 };
    tasks.ok("createBucket", json!({"Bucket": "maps"})).await?;
    for (key, body) in [
        ("rows.csv", "id,name\n1,\"a, b\"\n2,c\n"),
        ("lines.jsonl", "{\"n\":1}\n{\"n\":2}\n"),
        ("list.json", "{\"all\":[1,2,3]}"),
        ("broken.csv", "id\n\"1\n2\n"),
        ("broken.json", "{\"files\":["),
    ] {
        tasks.ok("putObject", json!({"Bucket": "maps", "Key": format!("in/{key}"), "Body": body})).await?;
    }
    for (n, (key, config, expected)) in [
        ("in/lines.jsonl", json!({"InputType": "JSONL"}), json!([{"n": 1}, {"n": 2}])),
        ("in/list.json", json!({"InputType": "JSON", "ItemsPointer": "/all", "MaxItems": 2}), json!([1, 2])),
    ]
    .into_iter()
    .enumerate()
    {
        let told = run(up, &format!("read{n}"), map(object(key, config), json!({}))).await?;
        ensure!(told == Ok(expected), "{key}: {told:?}");
    }
    for (n, (key, config, words)) in [
        ("in/none", json!({"InputType": "JSON"}), "The specified key does not exist."),
        ("in/broken.csv", json!({"InputType": "CSV"}), "the quoted cell that begins in line 2 has no end"),
        ("in/broken.json", json!({"InputType": "MANIFEST"}), "as JSON failed"),
        ("in/list.json", json!({"InputType": "MANIFEST"}), "names no destinationBucket"),
    ]
    .into_iter()
    .enumerate()
    {
        let told = run(up, &format!("broken{n}"), map(object(key, config), json!({}))).await?;
        let (name, cause) = told.err().context("it was read")?;
        ensure!(name == "States.ItemReaderFailed" && cause.contains(words), "{key}: {name}: {cause}");
    }
    let writer = json!({"ResultWriter": {"Resource": "arn:aws:states:::s3:putObject",
        "Parameters": {"Bucket": "maps", "Prefix": "out"}}});
    let rows = object("in/rows.csv", json!({"InputType": "CSV", "CSVHeaderLocation": "FIRST_ROW"}));
    let told = run(up, "written", map(rows, writer)).await?;
    let told = told.map_err(|(name, cause)| anyhow::anyhow!("{name}: {cause}"))?;
    let details = &told["ResultWriterDetails"];
    ensure!(details["Bucket"] == "maps", "{told}");
    let manifest = tasks.ok("getObject", json!({"Bucket": "maps", "Key": details["Key"]})).await?;
    let manifest: Value = serde_json::from_str(manifest["Body"].as_str().context("no body")?)?;
    let file = &manifest["ResultFiles"]["SUCCEEDED"][0]["Key"];
    let results = tasks.ok("getObject", json!({"Bucket": "maps", "Key": file})).await?;
    let results: Value = serde_json::from_str(results["Body"].as_str().context("no body")?)?;
    let mut outputs: Vec<_> =
        results.as_array().into_iter().flatten().filter_map(|result| result["Output"].as_str()).collect();
    outputs.sort_unstable();
    ensure!(outputs == [r#"{"id":"1","name":"a, b"}"#, r#"{"id":"2","name":"c"}"#], "{results}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn buckets_that_are_folders() -> Result<()> {
    let up = Up::start().await?;
    objects_and_buckets(&up).await?;
    items_and_results(&up).await?;
    let mut tasks = Tasks { up: &up, count: 200 };
    // Folders do not support tags.
    let tags = json!({"Bucket": "maps", "Key": "in/rows.csv", "Tagging": {"TagSet": []}});
    tasks.refused("putObjectTagging", tags, "S3.S3Exception", "not implemented here").await?;
    let ranged = json!({"Bucket": "maps", "Key": "in/rows.csv", "Range": "bytes=0-1"});
    tasks.refused("getObject", ranged, "S3.S3Exception", "Range of buckets that are folders").await?;
    let outside = json!({"Bucket": "maps", "Key": "../../workflows.db"});
    tasks.refused("getObject", outside, "S3.S3Exception", "Status Code: 400").await
}

#[tokio::test(flavor = "multi_thread")]
async fn buckets_of_a_service() -> Result<()> {
    let s3 = StandIn::start().await?;
    ensure!(stand_in_s3::unsigned(&s3.url).await? == 403, "the stand-in takes what is not signed");
    let up = over_s3(&s3, KEY).await?;
    objects_and_buckets(&up).await?;
    items_and_results(&up).await?;
    let mut tasks = Tasks { up: &up, count: 200 };
    let set = json!([{"Key": "k", "Value": "v & w"}]);
    let tags = json!({"Bucket": "maps", "Key": "in/rows.csv", "Tagging": {"TagSet": set}});
    tasks.ok("putObjectTagging", tags).await?;
    let tags = tasks.ok("getObjectTagging", json!({"Bucket": "maps", "Key": "in/rows.csv"})).await?;
    ensure!(tags == json!({ "TagSet": set }), "{tags}");
    let missing = json!({"Bucket": "maps", "Key": "none"});
    let words = "Request ID: STANDIN0, Extended Request ID: host/id=) (SDK Attempt Count: 1)";
    tasks.refused("getObject", missing, "S3.NoSuchKeyException", words).await?;
    ensure!(!up.data().join("workflows/buckets").exists(), "a folder was used beside the service");
    // The artifact store remains a bucket of Mayfly.
    let file = up.data().join("numbers.json");
    std::fs::write(&file, "[7,8]")?;
    let digest = mayfly_e2e::digest_of(b"[7,8]");
    let pushed = up.cli().ok(&["artifact", "push", &file.to_string_lossy()]).await?;
    ensure!(pushed.contains(&digest), "{pushed}");
    let mut reader = object(&digest, json!({"InputType": "JSON"}));
    reader["Parameters"]["Bucket"] = json!("artifacts");
    ensure!(run(&up, "artifact", map(reader, json!({}))).await? == Ok(json!([7, 8])));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_of_a_service_has_pages() -> Result<()> {
    let s3 = StandIn::start().await?;
    for n in 0..3000 {
        s3.put("maps", &format!("many & one/{n:04}"), "x");
    }
    let up = over_s3(&s3, KEY).await?;
    let reader = json!({"Resource": "arn:aws:states:::s3:listObjectsV2",
        "Parameters": {"Bucket": "maps", "Prefix": "many & one/"}});
    let batched = json!({"ItemBatcher": {"MaxItemsPerBatch": 1000},
        "ItemSelector": {"k.$": "$$.Map.Item.Value.Key"}, "MaxConcurrency": 1});
    let told = run(&up, "many", map(reader, batched)).await?;
    let told = told.map_err(|(name, cause)| anyhow::anyhow!("{name}: {cause}"))?;
    let counts: Vec<_> =
        told.as_array().into_iter().flatten().map(|batch| batch["Items"].as_array().map(Vec::len)).collect();
    ensure!(counts == [Some(1000); 3], "{counts:?}");
    ensure!(told[2]["Items"][999]["k"] == "many & one/2999", "{}", told[2]["Items"][999]);
    let pages = s3.asked().iter().filter(|asked| asked.contains("list-type=2")).count();
    ensure!(pages == 3, "{:?}", s3.asked());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_without_an_end_is_read_as_far_as_is_needed() -> Result<()> {
    let s3 = StandIn::start().await?;
    s3.put("maps", ENDLESS, "");
    let up = over_s3(&s3, KEY).await?;
    let reader = object(ENDLESS, json!({"InputType": "JSONL", "MaxItems": 3}));
    let told = run(&up, "endless", map(reader, json!({}))).await?;
    ensure!(told == Ok(json!([{"n": 1}, {"n": 1}, {"n": 1}])), "{told:?}");
    let mut tasks = Tasks { up: &up, count: 0 };
    let whole = json!({"Bucket": "maps", "Key": ENDLESS});
    tasks
        .refused("getObject", whole, "States.DataLimitExceeded", "exceeding the maximum number of bytes")
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_refuses_or_is_down_is_told() -> Result<()> {
    let s3 = StandIn::start().await?;
    s3.put("maps", "k", "[1]");
    let wanted = || json!({"Bucket": "maps", "Key": "k"});
    let up = over_s3(&s3, "another").await?;
    let mut tasks = Tasks { up: &up, count: 0 };
    let words = "does not match (Service: S3, Status Code: 403, Request ID: STANDIN0";
    tasks.refused("getObject", wanted(), "S3.S3Exception", words).await?;
    let told = run(&up, "denied", map(object("k", json!({"InputType": "JSON"})), json!({}))).await?;
    let (name, cause) = told.err().context("it was read")?;
    ensure!(
        name == "States.ItemReaderFailed" && cause.contains("Error Code: SignatureDoesNotMatch"),
        "{cause}"
    );
    let url = s3.url.clone();
    let up = over_s3(&s3, KEY).await?;
    drop(s3);
    let mut tasks = Tasks { up: &up, count: 0 };
    tasks.refused("getObject", wanted(), "S3.SdkClientException", "Unable to execute HTTP request").await?;
    let retried = json!({"StartAt": "T", "States": {
        "T": {"Type": "Task", "Resource": "arn:aws:states:::aws-sdk:s3:getObject", "Parameters": wanted(), "End": true,
            "Retry": [{"ErrorEquals": ["S3.SdkClientException"], "MaxAttempts": 1, "IntervalSeconds": 1}],
            "Catch": [{"ErrorEquals": ["S3.SdkClientException"], "Next": "C"}]},
        "C": {"Type": "Pass", "Result": "caught", "End": true}}});
    ensure!(run(&up, "retried", retried).await? == Ok(json!("caught")), "{url}");
    Ok(())
}
