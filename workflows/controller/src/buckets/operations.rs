//! S3's operations on folders, as far as folders can store their results.

use std::{borrow::Cow, io::Cursor};

use futures::TryStreamExt as _;
use mayfly_workflows_engine::engine::{ObjectCall, ObjectEntry, ObjectError, ObjectStore as _};
use serde_json::{Map, Value, json};

use super::{ARTIFACTS, Buckets, blocking, failed, files, not_artifacts};

/// The longest page of a listing: S3's.
const PAGE_KEYS_MAX: u64 = 1000;
/// S3's content type for objects without one.
const CONTENT_TYPE: &str = "binary/octet-stream";
/// Arguments that change nothing here: a folder has one owner, one class of storage, and keeps content alone.
const IDLE: &[&str] = &[
    "ACL",
    "ChecksumAlgorithm",
    "ContentLength",
    "ContentType",
    "ExpectedBucketOwner",
    "ExpectedSourceBucketOwner",
    "FetchOwner",
    "RequestPayer",
    "ServerSideEncryption",
    "StorageClass",
];

/// Arguments, of which all must be known.
struct Arguments(Map<String, Value>);

impl Arguments {
    fn text(&self, name: &str) -> &str {
        self.0.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    /// Refuses arguments that a folder cannot implement.
    fn only(&self, known: &[&str]) -> Result<(), ObjectError> {
        match self.0.keys().find(|name| !known.contains(&name.as_str()) && !IDLE.contains(&name.as_str())) {
            Some(name) => Err(ObjectError::not_implemented(&format!("{name} of buckets that are folders"))),
            None => Ok(()),
        }
    }
}

/// Carries out one operation.
pub(super) async fn carry_out(buckets: &Buckets, call: ObjectCall) -> Result<Value, ObjectError> {
    // Answers to HEAD have no message.
    let is_head = call.operation.starts_with("Head");
    let told = answer(buckets, call).await;
    told.map_err(|error| if is_head { ObjectError { message: String::new(), ..error } } else { error })
}

async fn answer(buckets: &Buckets, call: ObjectCall) -> Result<Value, ObjectError> {
    let Value::Object(arguments) = call.arguments else {
        return Err(ObjectError::invalid("arguments are an object"));
    };
    let given = Arguments(arguments);
    match call.operation.as_str() {
        "GetObject" => get(buckets, &given, call.body_bytes_max).await,
        "HeadObject" => {
            given.only(&["Bucket", "Key"])?;
            buckets.about(given.text("Bucket"), given.text("Key")).map(|entry| Value::Object(head(&entry)))
        }
        "PutObject" => put(buckets, &given).await,
        "CopyObject" => copy(buckets, &given).await,
        "DeleteObject" => {
            given.only(&["Bucket", "Key"])?;
            remove(buckets, given.text("Bucket"), given.text("Key")).await.map(|()| json!({}))
        }
        "DeleteObjects" => remove_all(buckets, &given).await,
        "ListObjectsV2" | "ListObjects" => list(buckets, &given, call.operation == "ListObjectsV2").await,
        "ListBuckets" => list_buckets(buckets, &given).await,
        "CreateBucket" | "DeleteBucket" | "HeadBucket" => bucket(buckets, &call.operation, &given).await,
        other => Err(ObjectError::not_implemented(&format!("{other} on buckets that are folders"))),
    }
}

/// The headers of an object.
fn head(entry: &ObjectEntry) -> Map<String, Value> {
    let told = json!({
        "AcceptRanges": "bytes",
        "ContentLength": entry.size,
        "ContentType": CONTENT_TYPE,
        "ETag": entry.etag,
        "LastModified": entry.last_modified.to_string(),
        "Metadata": {},
    });
    told.as_object().cloned().unwrap_or_default()
}

async fn get(buckets: &Buckets, given: &Arguments, bytes_max: usize) -> Result<Value, ObjectError> {
    given.only(&["Bucket", "Key", "VersionId"])?;
    let (bucket, key) = (given.text("Bucket"), given.text("Key"));
    let version = given.0.get("VersionId").and_then(Value::as_str);
    let mut parts = buckets.get(bucket, key, version).await?;
    let entry = buckets.about(bucket, key)?;
    let mut body = Vec::new();
    while let Some(part) = parts.try_next().await? {
        if body.len() + part.len() > bytes_max {
            return Err(ObjectError::too_large());
        }
        body.extend_from_slice(&part);
    }
    let body =
        String::from_utf8(body).map_err(|_| ObjectError::unreadable("the object is not UTF-8 text"))?;
    let mut told = head(&entry);
    told.insert("ContentLength".into(), body.len().into());
    told.insert("Body".into(), body.into());
    Ok(told.into())
}

async fn put(buckets: &Buckets, given: &Arguments) -> Result<Value, ObjectError> {
    given.only(&["Bucket", "Key", "Body"])?;
    let body = match given.0.get("Body") {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let bucket = given.text("Bucket");
    exists(buckets, bucket)?;
    let etag = buckets.write(bucket, given.text("Key"), Cursor::new(body)).await?;
    Ok(json!({ "ETag": etag }))
}

async fn copy(buckets: &Buckets, given: &Arguments) -> Result<Value, ObjectError> {
    given.only(&["Bucket", "Key", "CopySource"])?;
    let source = decoded(given.text("CopySource"));
    let (from, key) = source.trim_start_matches('/').split_once('/').ok_or_else(|| {
        ObjectError::new(
            400,
            "InvalidArgument",
            "Copy Source must mention the source bucket and key: bucket/key",
        )
    })?;
    let bucket = given.text("Bucket");
    exists(buckets, bucket)?;
    buckets.about(from, key)?;
    let file = std::fs::File::open(buckets.path(from, key)?).map_err(failed)?;
    buckets.write(bucket, given.text("Key"), file).await?;
    let entry = buckets.about(bucket, given.text("Key"))?;
    Ok(json!({"CopyObjectResult": {"ETag": entry.etag, "LastModified": entry.last_modified.to_string()}}))
}

/// `a%20b` is `a b`; what is no code stays.
fn decoded(text: &str) -> Cow<'_, str> {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy()
}

async fn remove(buckets: &Buckets, bucket: &str, key: &str) -> Result<(), ObjectError> {
    let path = buckets.writable(bucket, key)?;
    exists(buckets, bucket)?;
    let root = buckets.bucket(bucket)?;
    blocking(move || files::remove(&root, &path).map_err(failed)).await
}

async fn remove_all(buckets: &Buckets, given: &Arguments) -> Result<Value, ObjectError> {
    given.only(&["Bucket", "Delete"])?;
    let bucket = given.text("Bucket");
    exists(buckets, bucket)?;
    let wanted = given.0.get("Delete").cloned().unwrap_or_default();
    let (mut deleted, mut errors) = (Vec::new(), Vec::new());
    for object in wanted.get("Objects").and_then(Value::as_array).into_iter().flatten() {
        let key = object.get("Key").and_then(Value::as_str).unwrap_or_default();
        match remove(buckets, bucket, key).await {
            Ok(()) => deleted.push(json!({ "Key": key })),
            Err(error) => errors.push(json!({"Code": error.code, "Key": key, "Message": error.message})),
        }
    }
    let mut told = Map::new();
    let is_quiet = wanted.get("Quiet").and_then(Value::as_bool) == Some(true);
    if !deleted.is_empty() && !is_quiet {
        told.insert("Deleted".into(), deleted.into());
    }
    if !errors.is_empty() {
        told.insert("Errors".into(), errors.into());
    }
    Ok(told.into())
}

async fn list(buckets: &Buckets, given: &Arguments, is_second: bool) -> Result<Value, ObjectError> {
    let (token, after) = if is_second { ("ContinuationToken", "StartAfter") } else { ("Marker", "Marker") };
    given.only(&["Bucket", "Prefix", "Delimiter", "MaxKeys", token, after])?;
    let (bucket, prefix, delimiter) = (given.text("Bucket"), given.text("Prefix"), given.text("Delimiter"));
    let keys_max = given.0.get("MaxKeys").and_then(Value::as_u64).unwrap_or(PAGE_KEYS_MAX);
    let all = buckets.all(bucket, prefix).await?;
    let shown = given.text(token).max(given.text(after));
    let page = Listing::of(&all, prefix, delimiter, shown, keys_max.min(PAGE_KEYS_MAX));
    let mut told = Map::new();
    let count = page.contents.len() + page.prefixes.len();
    if !page.prefixes.is_empty() {
        let prefixes = page.prefixes.iter().map(|prefix| json!({ "Prefix": prefix }));
        told.insert("CommonPrefixes".into(), prefixes.collect());
    }
    if !page.contents.is_empty() {
        told.insert("Contents".into(), page.contents.iter().map(|entry| content(entry)).collect());
    }
    for name in ["Delimiter", token, after] {
        if given.0.contains_key(name) {
            told.insert(name.into(), given.text(name).into());
        }
    }
    told.insert("IsTruncated".into(), page.next.is_some().into());
    told.insert("MaxKeys".into(), keys_max.into());
    told.insert("Name".into(), bucket.into());
    told.insert("Prefix".into(), prefix.into());
    if is_second {
        told.insert("KeyCount".into(), count.into());
    } else {
        told.entry("Marker").or_insert("".into());
    }
    // The first version of the listing names its continuation only if keys are grouped.
    if let Some(next) = page.next.filter(|_| is_second || !delimiter.is_empty()) {
        told.insert(if is_second { "NextContinuationToken" } else { "NextMarker" }.into(), next.into());
    }
    Ok(told.into())
}

fn content(entry: &ObjectEntry) -> Value {
    json!({
        "ETag": entry.etag,
        "Key": entry.key,
        "LastModified": entry.last_modified.to_string(),
        "Size": entry.size,
        "StorageClass": entry.storage_class,
    })
}

/// A page of a listing.
struct Listing<'a> {
    contents: Vec<&'a ObjectEntry>,
    prefixes: Vec<&'a str>,
    /// The last shown key, if there are more.
    next: Option<&'a str>,
}

impl<'a> Listing<'a> {
    /// The page after `shown`, with keys grouped up to a delimiter.
    fn of(all: &'a [ObjectEntry], prefix: &str, delimiter: &str, shown: &str, keys_max: u64) -> Self {
        let mut page = Self { contents: Vec::new(), prefixes: Vec::new(), next: None };
        let mut last = None;
        for entry in all {
            let rest = entry.key.get(prefix.len()..).unwrap_or_default();
            let end = (!delimiter.is_empty()).then(|| rest.find(delimiter)).flatten();
            let name = match end {
                Some(end) => &entry.key[..prefix.len() + end + delimiter.len()],
                None => entry.key.as_str(),
            };
            if name <= shown || page.prefixes.last() == Some(&name) {
                continue;
            }
            if (page.contents.len() + page.prefixes.len()) as u64 >= keys_max {
                page.next = last;
                break;
            }
            match end {
                Some(_) => page.prefixes.push(name),
                None => page.contents.push(entry),
            }
            last = Some(name);
        }
        page
    }
}

async fn list_buckets(buckets: &Buckets, given: &Arguments) -> Result<Value, ObjectError> {
    given.only(&[])?;
    let folder = buckets.folder.clone();
    let found = blocking(move || {
        let mut found = Vec::new();
        let inside = match std::fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
            inside => inside.map_err(failed)?,
        };
        for entry in inside {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let about = entry.metadata().map_err(failed)?;
            let made = about.created().or_else(|_| about.modified()).map_err(failed)?;
            let made = jiff::Timestamp::try_from(made).map_err(failed)?.as_second();
            if about.is_dir() && !name.starts_with('.') {
                found.push((name, jiff::Timestamp::from_second(made).map_err(failed)?));
            }
        }
        Ok(found)
    });
    let mut found = found.await?;
    found.sort();
    let told = found.into_iter().map(|(name, made)| json!({"CreationDate": made.to_string(), "Name": name}));
    Ok(json!({"Buckets": told.collect::<Vec<_>>()}))
}

fn exists(buckets: &Buckets, bucket: &str) -> Result<(), ObjectError> {
    let there = bucket == ARTIFACTS || buckets.bucket(bucket)?.is_dir();
    if there { Ok(()) } else { Err(ObjectError::no_such_bucket()) }
}

async fn bucket(buckets: &Buckets, operation: &str, given: &Arguments) -> Result<Value, ObjectError> {
    let name = given.text("Bucket");
    let folder = buckets.bucket(name)?;
    if operation == "HeadBucket" {
        given.only(&["Bucket"])?;
        return exists(buckets, name).map(|()| json!({}));
    }
    not_artifacts(name)?;
    if operation == "DeleteBucket" {
        given.only(&["Bucket"])?;
        exists(buckets, name)?;
        let refused = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::DirectoryNotEmpty => {
                ObjectError::new(409, "BucketNotEmpty", "The bucket you tried to delete is not empty")
            }
            _ => failed(error),
        };
        return blocking(move || std::fs::remove_dir(folder).map_err(refused)).await.map(|()| json!({}));
    }
    given.only(&["Bucket", "CreateBucketConfiguration"])?;
    if folder.is_dir() {
        let message = "Your previous request to create the named bucket succeeded and you already own it.";
        return Err(ObjectError::new(409, "BucketAlreadyOwnedByYou", message));
    }
    let location = format!("/{name}");
    blocking(move || std::fs::create_dir_all(folder).map_err(failed)).await?;
    Ok(json!({ "Location": location }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_has_pages_and_puts_keys_together() {
        let entry = |key: &&str| ObjectEntry {
            key: (*key).to_owned(),
            etag: String::new(),
            last_modified: jiff::Timestamp::UNIX_EPOCH,
            size: 1,
            storage_class: String::new(),
        };
        let all: Vec<_> = ["p/a", "p/b/1", "p/b/2", "p/c", "p/d/3"].iter().map(entry).collect();
        let told = |shown: &str, keys_max| {
            let page = Listing::of(&all, "p/", "/", shown, keys_max);
            let keys: Vec<_> = page.contents.iter().map(|entry| entry.key.as_str()).collect();
            (keys.join(" "), page.prefixes.join(" "), page.next.unwrap_or("-").to_owned())
        };
        let expect = |keys: &str, prefixes: &str, next: &str| (keys.into(), prefixes.into(), next.into());
        assert_eq!(told("", 9), expect("p/a p/c", "p/b/ p/d/", "-"));
        assert_eq!(told("", 2), expect("p/a", "p/b/", "p/b/"));
        assert_eq!(told("p/b/", 2), expect("p/c", "p/d/", "-"));
        assert_eq!(told("p/d/", 2), expect("", "", "-"));
        assert_eq!(Listing::of(&all, "", "", "", 2).next, Some("p/b/1"));
    }
}
