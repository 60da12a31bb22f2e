//! A distributed Map's items from each kind of reader.

use std::io::Write as _;

use super::*;

/// The result of a Map that passes its items through, for these files; or its error.
async fn items(
    reader: serde_json::Value,
    files: &[(&str, bytes::Bytes)],
) -> Result<serde_json::Value, String> {
    let world = TestEngine::new().await;
    for (name, body) in files {
        world.files.0.lock().insert((*name).to_owned(), body.clone());
    }
    let definition = json!({"StartAt": "M", "States": {"M": {"Type": "Map", "End": true, "ItemReader": reader,
        "ItemProcessor": {"ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
            "StartAt": "P", "States": {"P": {"Type": "Pass", "End": true}}}}}});
    let (ended, _) = world.run(definition, "{}").await;
    match ended.output {
        Some(output) => Ok(serde_json::from_str(&output).expect("JSON")),
        None => {
            assert_eq!(ended.error.as_deref(), Some("States.ItemReaderFailed"));
            Err(ended.cause.unwrap_or_default())
        }
    }
}

fn object(config: serde_json::Value) -> serde_json::Value {
    json!({"Resource": "arn:aws:states:::s3:getObject", "ReaderConfig": config,
        "Parameters": {"Bucket": "b", "Key": "k"}})
}

fn listing(config: serde_json::Value) -> serde_json::Value {
    json!({"Resource": "arn:aws:states:::s3:listObjectsV2", "ReaderConfig": config,
        "Parameters": {"Bucket": "b", "Prefix": "p/"}})
}

#[tokio::test]
async fn a_listing_is_followed_over_its_pages() {
    let names: Vec<_> = (0..5).map(|n| format!("b/p/{n}")).collect();
    let files: Vec<_> = names.iter().map(|name| (name.as_str(), "12".into())).collect();
    let all = items(listing(json!({})), &files).await.expect("items");
    let keys: Vec<_> = all.as_array().into_iter().flatten().map(|item| item["Key"].clone()).collect();
    assert_eq!(keys, ["p/0", "p/1", "p/2", "p/3", "p/4"]);
    assert_eq!(
        all[0],
        json!({"Etag": "\"e\"", "Key": "p/0", "LastModified": 0, "Size": 2, "StorageClass": "STANDARD"})
    );
    let three = items(listing(json!({"MaxItems": 3})), &files).await.expect("items");
    assert_eq!(three.as_array().map(Vec::len), Some(3));
}

#[tokio::test]
async fn objects_of_a_listing_are_read_as_one() {
    let config = json!({"InputType": "JSONL", "Transformation": "LOAD_AND_FLATTEN"});
    let files = [
        ("b/p/", "".into()),
        ("b/p/1", "{\"n\":1}\n{\"n\":2}\n".into()),
        ("b/p/2", "3".into()),
        ("b/q", "4".into()),
    ];
    assert_eq!(items(listing(config), &files).await, Ok(json!([{"n": 1}, {"n": 2}, 3])));
}

#[tokio::test]
async fn an_inventory_names_files() {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(b"\"src\",\"a b\",\"7\"\n\"src\",\"c\",\"8\"\n").expect("written");
    let packed = packed.finish().expect("written");
    let manifest = |more: &str| {
        format!(
            r#"{{"sourceBucket":"src","destinationBucket":"arn:aws:s3:::inventory","version":"2016-11-30",
                "fileSchema":"Bucket, Key, Size"{more}}}"#
        )
    };
    let whole = manifest(r#","fileFormat":"CSV","files":[{"key":"data/1.csv.gz","size":1}]"#);
    let files = [("b/k", whole.into()), ("inventory/data/1.csv.gz", packed.into())];
    let found = items(object(json!({"InputType": "MANIFEST"})), &files).await;
    let row = |key: &str, size: &str| json!({"Bucket": "src", "Key": key, "Size": size});
    assert_eq!(found, Ok(json!([row("a b", "7"), row("c", "8")])));
    for (broken, words) in [
        (manifest(r#","fileFormat":"Parquet","files":[]"#), "fileFormat is Parquet"),
        (manifest(""), "it names no files"),
        (manifest(r#","files":[{"key":"gone"}]"#), "The specified key does not exist"),
        ("[]".to_owned(), "names no destinationBucket"),
        ("{".to_owned(), "as JSON failed"),
    ] {
        let found = items(object(json!({"InputType": "MANIFEST"})), &[("b/k", broken.into())]).await;
        let cause = found.expect_err("a broken manifest");
        assert!(cause.contains(words), "{words}: {cause}");
    }
}

#[tokio::test]
async fn what_athena_unloaded_is_read() {
    let config = json!({"InputType": "JSONL", "ManifestType": "ATHENA_DATA"});
    let files = [
        ("b/k", "s3://there/a/1\ns3://there/2\n".into()),
        ("there/a/1", "1\n2\n".into()),
        ("there/2", "3\n".into()),
    ];
    assert_eq!(items(object(config.clone()), &files).await, Ok(json!([1, 2, 3])));
    let broken = items(object(config), &[("b/k", "there/1\n".into())]).await.expect_err("no address");
    assert!(broken.contains("no s3://bucket/key"), "{broken}");
}
