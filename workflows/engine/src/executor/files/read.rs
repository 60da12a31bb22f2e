//! Reads what an `ItemReader` names: an object, a listing, or the objects of a manifest.

use futures::StreamExt as _;
use mayfly_workflows_language::definition::{ItemReader, StateId, StateKind};
use mayfly_workflows_language::value::Value;

use super::records::{RecordFormat, Records, Unpacked};
use crate::engine::{ObjectEntry, ObjectError, ObjectStore, Reporter};

/// Reads the items a Map's `ItemReader` names: an array.
pub(crate) async fn read_items(
    reporter: &Reporter,
    state: StateId,
    arguments: &Value,
    max_items: Option<u64>,
) -> Result<Value, String> {
    let definition = reporter.state_machine().definition.clone();
    let StateKind::Map(map) = &definition.state(state).kind else { return Ok(Value::from(Vec::new())) };
    let Some(reader) = &map.item_reader else { return Ok(Value::from(Vec::new())) };
    let mut reading = Reading {
        objects: &*reporter.inner.deps.objects,
        reader,
        items: Vec::new(),
        items_max: max_items
            .filter(|limit| *limit > 0)
            .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX)),
        bytes_max: reporter.inner.config.limits.item_bytes,
        bytes: 0,
    };
    reading.all(arguments).await?;
    reading.items.truncate(reading.items_max);
    Ok(Value::from(reading.items))
}

fn argument<'a>(arguments: &'a Value, name: &str) -> Result<&'a str, String> {
    arguments
        .get(name)
        .and_then(Value::as_str)
        .ok_or_else(|| format!("The field '{name}' is required but was missing"))
}

/// The items so far.
struct Reading<'a> {
    objects: &'a dyn ObjectStore,
    reader: &'a ItemReader,
    items: Vec<Value>,
    items_max: usize,
    bytes_max: usize,
    /// Of all files so far, unpacked.
    bytes: usize,
}

impl Reading<'_> {
    async fn all(&mut self, arguments: &Value) -> Result<(), String> {
        let reader = self.reader;
        let bucket = argument(arguments, "Bucket")?;
        if reader.resource.contains("listObjects") {
            let prefix = arguments.get("Prefix").and_then(Value::as_str).unwrap_or_default();
            return self.listing(bucket, prefix).await;
        }
        let key = argument(arguments, "Key")?;
        let version = arguments.get("VersionId").and_then(Value::as_str);
        match (reader.input_type.as_deref(), reader.manifest_type.as_deref()) {
            (_, Some("ATHENA_DATA")) => self.unloaded(bucket, key, version).await,
            (Some("MANIFEST"), _) => self.inventory(bucket, key, version).await,
            _ => self.object(bucket, key, version, RecordFormat::of(reader)?).await,
        }
    }

    fn is_full(&self) -> bool {
        self.items.len() >= self.items_max
    }

    /// The objects of a bucket, or their content.
    async fn listing(&mut self, bucket: &str, prefix: &str) -> Result<(), String> {
        let flattens = self.reader.transformation.as_deref() == Some("LOAD_AND_FLATTEN");
        let mut from = None;
        loop {
            let page = self.objects.list(bucket, prefix, from).await.map_err(ObjectError::for_map)?;
            for entry in &page.entries {
                if self.is_full() {
                    return Ok(());
                }
                if !flattens {
                    let item = item(entry);
                    self.count(item.text_len())?;
                    self.items.push(item);
                } else if entry.size > 0 {
                    // An object without content may stand for a folder.
                    self.object(bucket, &entry.key, None, RecordFormat::of(self.reader)?).await?;
                }
            }
            match page.next {
                Some(next) => from = Some(next),
                None => return Ok(()),
            }
        }
    }

    /// The items of one object, read until there are enough.
    async fn object(
        &mut self,
        bucket: &str,
        key: &str,
        version: Option<&str>,
        format: RecordFormat,
    ) -> Result<(), String> {
        let mut body = self.objects.get(bucket, key, version).await.map_err(ObjectError::for_map)?;
        let (mut unpacked, mut records) = (Unpacked::default(), Records::new(key, format));
        while let Some(part) = body.next().await {
            unpacked.push(&part.map_err(ObjectError::for_map)?, |bytes| {
                self.count(bytes.len())?;
                records.push(bytes, &mut self.items)
            })?;
            if self.is_full() {
                return Ok(());
            }
        }
        unpacked.end(key, |bytes| {
            self.count(bytes.len())?;
            records.push(bytes, &mut self.items)
        })?;
        records.end(&mut self.items)
    }

    /// Everything that is read is in memory at once.
    fn count(&mut self, bytes: usize) -> Result<(), String> {
        self.bytes += bytes;
        match self.bytes <= self.bytes_max {
            true => Ok(()),
            false => Err(format!(
                "The items are larger than {} bytes: set MaxItems, or read several smaller files",
                self.bytes_max
            )),
        }
    }

    /// One object as a value of its own, not as items.
    async fn apart(
        &mut self,
        bucket: &str,
        key: &str,
        version: Option<&str>,
        format: RecordFormat,
    ) -> Result<Vec<Value>, String> {
        let (items, items_max) =
            (std::mem::take(&mut self.items), std::mem::replace(&mut self.items_max, usize::MAX));
        let read = self.object(bucket, key, version, format).await;
        self.items_max = items_max;
        let found = std::mem::replace(&mut self.items, items);
        read.map(|()| found)
    }

    /// S3's inventory: a manifest names files in CSV, without headers and compressed.
    async fn inventory(&mut self, bucket: &str, key: &str, version: Option<&str>) -> Result<(), String> {
        let wrong = |what: &str| format!("The manifest {key} is not one of S3's inventory: {what}");
        let manifest = self.apart(bucket, key, version, RecordFormat::Value).await?;
        let manifest = manifest.into_iter().next().unwrap_or_default();
        let text = |name: &str| manifest.get(name).and_then(Value::as_str);
        let there = text("destinationBucket").ok_or_else(|| wrong("it names no destinationBucket"))?;
        let there = there.rsplit(':').next().unwrap_or(there).to_owned();
        if let Some(format) = text("fileFormat").filter(|format| *format != "CSV") {
            return Err(wrong(&format!("its fileFormat is {format}, and only CSV is read here")));
        }
        let schema = text("fileSchema").ok_or_else(|| wrong("it names no fileSchema"))?;
        let headers: Vec<_> = schema.split(',').map(|header| header.trim().into()).collect();
        let files =
            manifest.get("files").and_then(Value::as_array).ok_or_else(|| wrong("it names no files"))?;
        for file in files {
            let key = file.get("key").and_then(Value::as_str).ok_or_else(|| wrong("a file has no key"))?;
            let format = RecordFormat::Csv { delimiter: b',', headers: Some(headers.clone()) };
            self.object(&there, key, None, format).await?;
            if self.is_full() {
                break;
            }
        }
        Ok(())
    }

    /// The output of Athena's UNLOAD: a manifest that is a list of addresses.
    async fn unloaded(&mut self, bucket: &str, key: &str, version: Option<&str>) -> Result<(), String> {
        let format = RecordFormat::Csv { delimiter: b',', headers: Some(vec!["at".into()]) };
        for line in self.apart(bucket, key, version, format).await? {
            let at = line.get("at").and_then(Value::as_str).unwrap_or_default();
            let (bucket, object) = at
                .strip_prefix("s3://")
                .and_then(|at| at.split_once('/'))
                .ok_or_else(|| format!("The manifest {key} has a line that is no s3://bucket/key: {at:?}"))?;
            self.object(bucket, object, None, RecordFormat::of(self.reader)?).await?;
            if self.is_full() {
                break;
            }
        }
        Ok(())
    }
}

fn item(entry: &ObjectEntry) -> Value {
    Value::object([
        ("Etag", Value::from(entry.etag.as_str())),
        ("Key", Value::from(entry.key.as_str())),
        ("LastModified", Value::from(entry.last_modified.as_second())),
        ("Size", Value::from(entry.size)),
        ("StorageClass", Value::from(entry.storage_class.as_str())),
    ])
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures::future::BoxFuture;

    use super::*;
    use crate::engine::{ObjectBody, ObjectPage};

    /// Buckets of one object without an end: `row` again and again.
    struct Endless(&'static str);

    impl ObjectStore for Endless {
        fn get(&self, _: &str, _: &str, _: Option<&str>) -> BoxFuture<'_, Result<ObjectBody, ObjectError>> {
            let row = Bytes::from_static(self.0.as_bytes());
            Box::pin(async { Ok(futures::stream::repeat_with(move || Ok(row.clone())).boxed()) })
        }

        fn put(&self, _: &str, _: &str, _: Bytes) -> BoxFuture<'_, Result<(), ObjectError>> {
            Box::pin(async { Err(ObjectError::no_such_bucket()) })
        }

        fn list(
            &self,
            _: &str,
            _: &str,
            _: Option<String>,
        ) -> BoxFuture<'_, Result<ObjectPage, ObjectError>> {
            Box::pin(async { Err(ObjectError::no_such_bucket()) })
        }
    }

    async fn read(row: &'static str, input_type: &str, items_max: usize) -> Result<String, String> {
        let reader = ItemReader {
            resource: "arn:aws:states:::s3:getObject".into(),
            arguments: None,
            input_type: Some(input_type.into()),
            transformation: None,
            manifest_type: None,
            csv_header_location: None,
            csv_headers: Vec::new(),
            csv_delimiter: None,
            items_pointer: None,
            max_items: None,
        };
        let objects = Endless(row);
        let mut reading = Reading {
            objects: &objects,
            reader: &reader,
            items: Vec::new(),
            items_max,
            bytes_max: 1000,
            bytes: 0,
        };
        reading.all(&Value::object([("Bucket", Value::from("b")), ("Key", Value::from("k"))])).await?;
        Ok(Value::from(reading.items).to_text())
    }

    #[tokio::test]
    async fn no_more_is_read_than_there_are_items_wanted() {
        assert_eq!(read("1\n", "JSONL", 3).await.expect("items"), "[1,1,1]");
        assert_eq!(read("h\n", "CSV", 2).await.expect("items"), r#"[{"h":"h"},{"h":"h"}]"#);
    }

    #[tokio::test]
    async fn what_would_not_fit_into_memory_is_refused() {
        for (row, input_type) in [("1\n", "JSONL"), ("h\n", "CSV"), ("[", "JSON"), ("x", "JSONL")] {
            let refused = read(row, input_type, usize::MAX).await.expect_err("endless");
            assert!(refused.contains("larger than 1000 bytes"), "{refused}");
        }
        assert!(read("h\n", "PARQUET", 1).await.expect_err("not read").contains("PARQUET is not read here"));
    }
}
