//! A small S3 service for tests: buckets in memory, with verification of every request's signature.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use http::{HeaderMap, Method, Request, Response, Uri, request::Parts};
use http_body_util::{BodyExt as _, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper_util::rt::TokioIo;
use sha2::{Digest as _, Sha256};
use tokio::net::TcpListener;

pub(crate) const KEY_ID: &str = "AKSTANDIN";
pub(crate) const KEY: &str = "the/secret+of=this";
/// The key of an endless object.
pub(crate) const ENDLESS: &str = "endless.jsonl";
const MODIFIED: [&str; 2] = ["2024-02-01T10:00:00.000Z", "Thu, 01 Feb 2024 10:00:00 GMT"];
const PAGE_KEYS: usize = 1000;

type Buckets = BTreeMap<String, BTreeMap<String, Object>>;
type Body = UnsyncBoxBody<Bytes, std::convert::Infallible>;

#[derive(Clone, Default)]
struct Object {
    body: Bytes,
    tags: String,
}

/// The result of a request: a status, headers, a body.
type Told = (u16, Vec<(&'static str, String)>, Bytes);

#[derive(Default)]
struct State {
    buckets: Mutex<Buckets>,
    /// Method and path with query of the requests with valid signatures.
    asked: Mutex<Vec<String>>,
}

pub(crate) struct StandIn {
    pub(crate) url: String,
    state: Arc<State>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StandIn {
    pub(crate) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let state = Arc::<State>::default();
        let all = state.clone();
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let state = all.clone();
                let service = hyper::service::service_fn(move |request| answer(request, state.clone()));
                tokio::spawn(async move {
                    // A disconnected client is not an error of the test.
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Ok(Self { url, state, server })
    }

    pub(crate) fn put(&self, bucket: &str, key: &str, body: &str) {
        let object = Object { body: Bytes::from(body.to_owned()), tags: String::new() };
        locked(&self.state.buckets).entry(bucket.to_owned()).or_default().insert(key.to_owned(), object);
    }

    pub(crate) fn asked(&self) -> Vec<String> {
        locked(&self.state.asked).clone()
    }
}

async fn answer(request: Request<Incoming>, state: Arc<State>) -> Result<Response<Body>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let is_head = parts.method == Method::HEAD;
    let (status, headers, content) = match signed(&parts, &body) {
        Ok(()) => {
            locked(&state.asked).push(format!("{} {}", parts.method, parts.uri));
            carry_out(&parts, &body, &mut locked(&state.buckets))
        }
        Err(refused) => refused,
    };
    let mut response = Response::builder()
        .status(status)
        .header("x-amz-request-id", "STANDIN0")
        .header("x-amz-id-2", "host/id=");
    for (name, value) in headers {
        response = response.header(name, value);
    }
    let body = if parts.uri.path().ends_with(ENDLESS) && status == 200 {
        let line = Bytes::from("{\"n\":1}\n".repeat(1000));
        StreamBody::new(futures::stream::repeat_with(move || Ok(Frame::data(line.clone())))).boxed_unsync()
    } else {
        http_body_util::Full::new(if is_head { Bytes::new() } else { content }).boxed_unsync()
    };
    Ok(response.body(body)?)
}

fn error(status: u16, code: &str, message: &str) -> Told {
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{message}</Message>\
         <RequestId>STANDIN0</RequestId></Error>"
    );
    (status, vec![("content-type", "application/xml".to_owned())], text.into())
}

/// Verifies a signature of version 4.
fn signed(parts: &Parts, body: &Bytes) -> Result<(), Told> {
    let denied = || error(403, "AccessDenied", "Access Denied");
    let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let authorization = header("authorization").ok_or_else(denied)?;
    let rest = authorization.strip_prefix("AWS4-HMAC-SHA256 ").ok_or_else(denied)?;
    let field = |name: &str| rest.split(", ").find_map(|part| part.strip_prefix(name)).ok_or_else(denied);
    let (credential, names, signature) =
        (field("Credential=")?, field("SignedHeaders=")?, field("Signature=")?);
    let (id, scope) = credential.split_once('/').ok_or_else(denied)?;
    if id != KEY_ID {
        return Err(error(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist"));
    }
    let [date, region, "s3", "aws4_request"] = scope.split('/').collect::<Vec<_>>()[..] else {
        return Err(denied());
    };
    let hash = hex::encode(Sha256::digest(body));
    let needed = ["host", "x-amz-content-sha256", "x-amz-date"];
    if header("x-amz-content-sha256") != Some(&hash)
        || needed.iter().any(|name| !names.split(';').any(|signed| signed == *name))
    {
        return Err(denied());
    }
    let moment = header("x-amz-date").filter(|moment| moment.starts_with(date)).ok_or_else(denied)?;
    let headers: String = names
        .split(';')
        .map(|name| format!("{name}:{}\n", header(name).unwrap_or_default().trim()))
        .collect();
    let mut query = query(&parts.uri);
    query.sort();
    let query: Vec<_> =
        query.iter().map(|(name, value)| format!("{}={}", coded(name, ""), coded(value, ""))).collect();
    let path = coded(&plain(parts.uri.path()), "/");
    let canonical = format!("{}\n{path}\n{}\n{headers}\n{names}\n{hash}", parts.method, query.join("&"));
    let text = format!("AWS4-HMAC-SHA256\n{moment}\n{scope}\n{}", hex::encode(Sha256::digest(canonical)));
    let mut key = hmac(format!("AWS4{KEY}").as_bytes(), date);
    for part in [region, "s3", "aws4_request"] {
        key = hmac(&key, part);
    }
    match hex::encode(hmac(&key, &text)) == signature {
        true => Ok(()),
        false => {
            Err(error(403, "SignatureDoesNotMatch", "The request signature we calculated does not match"))
        }
    }
}

/// HMAC-SHA256.
fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, key);
    ring::hmac::sign(&key, text.as_bytes()).as_ref().to_vec()
}

/// Percent-encodes all characters except unreserved ones and those in `kept`.
fn coded(text: &str, kept: &str) -> String {
    let is_plain =
        |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(byte) || kept.as_bytes().contains(byte);
    text.bytes()
        .map(|byte| if is_plain(&byte) { char::from(byte).into() } else { format!("%{byte:02X}") })
        .collect()
}

fn plain(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let code = (*first == b'%').then(|| more.get(..2)).flatten();
        match code.and_then(|code| hex::decode(code).ok()) {
            Some(byte) => {
                bytes.extend(byte);
                rest = &more[2..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn query(uri: &Uri) -> Vec<(String, String)> {
    let pairs = uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    pairs.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).map(|(a, b)| (plain(a), plain(b))).collect()
}

fn xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

fn etag(object: &Object) -> String {
    format!("\"{}\"", &hex::encode(Sha256::digest(&object.body))[..32])
}

fn document(text: String) -> Told {
    let head = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
    (200, vec![("content-type", "application/xml".to_owned())], format!("{head}{text}").into())
}

/// A parameter of the query.
type Asks<'a> = &'a dyn Fn(&str) -> Option<String>;

fn carry_out(parts: &Parts, body: &Bytes, buckets: &mut Buckets) -> Told {
    let path = plain(parts.uri.path());
    let path = path.trim_start_matches('/');
    let query = query(&parts.uri);
    let asks = |name: &str| query.iter().find(|(found, _)| found == name).map(|(_, value)| value.clone());
    let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
    if bucket.is_empty() {
        let all: String = buckets
            .keys()
            .map(|name| {
                format!("<Bucket><Name>{name}</Name><CreationDate>{}</CreationDate></Bucket>", MODIFIED[0])
            })
            .collect();
        return document(format!(
            "<ListAllMyBucketsResult><Buckets>{all}</Buckets></ListAllMyBucketsResult>"
        ));
    }
    let source = parts.headers.get("x-amz-copy-source").and_then(|source| source.to_str().ok()).map(plain);
    let source = source.map(|source| {
        let (bucket, key) = source.trim_start_matches('/').split_once('/').unwrap_or_default();
        buckets.get(bucket).and_then(|objects| objects.get(key)).cloned()
    });
    match (buckets.get_mut(bucket), key, parts.method.as_str()) {
        (Some(_), "", "PUT") => error(
            409,
            "BucketAlreadyOwnedByYou",
            "Your previous request to create the named bucket succeeded",
        ),
        (None, "", "PUT") => {
            buckets.insert(bucket.to_owned(), BTreeMap::new());
            (200, vec![("location", format!("/{bucket}"))], Bytes::new())
        }
        (None, ..) => error(404, "NoSuchBucket", "The specified bucket does not exist"),
        (Some(objects), "", "DELETE") if objects.is_empty() => {
            buckets.remove(bucket);
            (204, vec![], Bytes::new())
        }
        (Some(objects), "", _) => of_bucket(bucket, objects, parts, body, &asks),
        (Some(objects), key, _) if asks("tagging").is_some() => of_tags(objects, key, parts, body),
        (Some(objects), key, _) => of_object(objects, key, source, parts, body),
    }
}

fn of_bucket(
    bucket: &str,
    objects: &mut BTreeMap<String, Object>,
    parts: &Parts,
    body: &Bytes,
    asks: Asks<'_>,
) -> Told {
    match (parts.method.as_str(), asks("delete").is_some()) {
        ("HEAD", _) => (200, vec![], Bytes::new()),
        ("DELETE", _) => error(409, "BucketNotEmpty", "The bucket you tried to delete is not empty"),
        ("POST", true) if !parts.headers.contains_key("content-md5") => {
            error(400, "InvalidRequest", "Missing required header for this request: Content-MD5")
        }
        ("POST", true) => {
            let text = String::from_utf8_lossy(body);
            let keys = text.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next());
            let deleted: String = keys
                .map(|key| {
                    objects.remove(&key.replace("&lt;", "<").replace("&amp;", "&"));
                    format!("<Deleted><Key>{key}</Key></Deleted>")
                })
                .collect();
            document(format!("<DeleteResult>{deleted}</DeleteResult>"))
        }
        _ => listing(bucket, objects, asks),
    }
}

fn missing() -> Told {
    error(404, "NoSuchKey", "The specified key does not exist.")
}

fn of_tags(objects: &mut BTreeMap<String, Object>, key: &str, parts: &Parts, body: &Bytes) -> Told {
    let Some(object) = objects.get_mut(key) else { return missing() };
    if parts.method == Method::PUT {
        let text = String::from_utf8_lossy(body);
        let set = text.split("<TagSet>").nth(1).and_then(|rest| rest.split("</TagSet>").next());
        object.tags = set.unwrap_or_default().to_owned();
        return (200, vec![], Bytes::new());
    }
    document(format!("<Tagging><TagSet>{}</TagSet></Tagging>", object.tags))
}

fn of_object(
    objects: &mut BTreeMap<String, Object>,
    key: &str,
    source: Option<Option<Object>>,
    parts: &Parts,
    body: &Bytes,
) -> Told {
    match (parts.method.as_str(), source) {
        ("PUT", Some(None)) => missing(),
        ("PUT", Some(Some(object))) => {
            let tag = xml(&etag(&object));
            objects.insert(key.to_owned(), object);
            let at = MODIFIED[0];
            document(format!(
                "<CopyObjectResult><LastModified>{at}</LastModified><ETag>{tag}</ETag></CopyObjectResult>"
            ))
        }
        ("PUT", None) => {
            let object = Object { body: body.clone(), tags: String::new() };
            let tag = etag(&object);
            objects.insert(key.to_owned(), object);
            (200, vec![("etag", tag)], Bytes::new())
        }
        ("DELETE", _) => {
            objects.remove(key);
            (204, vec![], Bytes::new())
        }
        _ => objects.get(key).map_or_else(missing, |object| {
            let mut headers = vec![
                ("etag", etag(object)),
                ("accept-ranges", "bytes".to_owned()),
                ("content-type", "binary/octet-stream".to_owned()),
                ("last-modified", MODIFIED[1].to_owned()),
            ];
            if parts.method == Method::HEAD {
                headers.push(("content-length", object.body.len().to_string()));
            }
            (200, headers, object.body.clone())
        }),
    }
}

fn listing(bucket: &str, objects: &BTreeMap<String, Object>, asks: &dyn Fn(&str) -> Option<String>) -> Told {
    let is_second = asks("list-type").as_deref() == Some("2");
    let (prefix, delimiter) = (asks("prefix").unwrap_or_default(), asks("delimiter").unwrap_or_default());
    let wanted = asks("max-keys").and_then(|keys| keys.parse().ok()).unwrap_or(PAGE_KEYS);
    let after = asks("continuation-token").or_else(|| asks("marker")).unwrap_or_default();
    let encode = |text: &str| if asks("encoding-type").is_some() { coded(text, "/") } else { xml(text) };
    let (mut shown, mut prefixes, mut last, mut more) = (String::new(), Vec::new(), String::new(), false);
    let mut count = 0;
    for (key, object) in objects.iter().filter(|(key, _)| key.starts_with(&prefix)) {
        let end = (!delimiter.is_empty()).then(|| key[prefix.len()..].find(&delimiter)).flatten();
        let name = end.map_or(key.as_str(), |end| &key[..prefix.len() + end + delimiter.len()]);
        if name <= after.as_str() || prefixes.iter().any(|seen: &String| seen == name) {
            continue;
        }
        if count == wanted.min(PAGE_KEYS) {
            more = true;
            break;
        }
        count += 1;
        last = name.to_owned();
        match end {
            Some(_) => prefixes.push(name.to_owned()),
            None => shown.push_str(&format!(
                "<Contents><Key>{}</Key><LastModified>{}</LastModified><ETag>{}</ETag><Size>{}</Size>\
                 <StorageClass>STANDARD</StorageClass></Contents>",
                encode(key),
                MODIFIED[0],
                xml(&etag(object)),
                object.body.len()
            )),
        }
    }
    let prefixes: String = prefixes
        .iter()
        .map(|prefix| format!("<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>", encode(prefix)))
        .collect();
    let own = match (is_second, more) {
        (true, true) => format!(
            "<KeyCount>{count}</KeyCount><NextContinuationToken>{}</NextContinuationToken>",
            xml(&last)
        ),
        (true, false) => format!("<KeyCount>{count}</KeyCount>"),
        (false, _) => format!("<Marker>{}</Marker>", xml(&after)),
    };
    let coding = if asks("encoding-type").is_some() { "<EncodingType>url</EncodingType>" } else { "" };
    document(format!(
        "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>{bucket}</Name><Prefix>{}</Prefix>\
         <MaxKeys>{wanted}</MaxKeys><IsTruncated>{more}</IsTruncated>{own}{coding}{shown}{prefixes}</ListBucketResult>",
        encode(&prefix)
    ))
}

/// Sends an unsigned request; returns the status, which differs from that of a wrong signature.
pub(crate) async fn unsigned(url: &str) -> Result<u16> {
    let address = url.strip_prefix("http://").context("no URL")?;
    let stream = tokio::net::TcpStream::connect(address).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let mut request = Request::get("/").body(http_body_util::Empty::<Bytes>::new())?;
    *request.headers_mut() = HeaderMap::from_iter([(http::header::HOST, address.parse()?)]);
    let status = sender.send_request(request).await?.status().as_u16();
    connection.abort();
    Ok(status)
}
