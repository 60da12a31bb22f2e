//! A host whose artifact store is a cache of another node's.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::{
    pods::{ANSWERS, Pod},
    support::{text::handler, *},
};
use futures::{
    FutureExt as _, StreamExt as _,
    future::{self, BoxFuture},
    stream,
};
use mayfly_api::Digest;
use mayfly_artifacts::{ArtifactOrigin, Artifacts, CacheConfig, ContentStream, OriginError};
use mayfly_runtime::{CallError, FunctionHost as _, RuntimeError};
use parking_lot::Mutex;

/// The server's artifact store.
#[derive(Debug, Default)]
struct Server {
    contents: Mutex<Vec<Vec<u8>>>,
    away: Mutex<bool>,
    fetches: AtomicUsize,
}

impl Server {
    fn add(&self, content: Vec<u8>) -> Digest {
        let digest = Digest::of(&content);
        self.contents.lock().push(content);
        digest
    }

    fn be_away(&self, away: bool) {
        *self.away.lock() = away;
    }

    fn fetches(&self) -> usize {
        self.fetches.load(Ordering::SeqCst)
    }
}

impl ArtifactOrigin for Server {
    fn fetch(&self, digest: Digest) -> BoxFuture<'_, Result<Option<ContentStream>, OriginError>> {
        self.fetches.fetch_add(1, Ordering::SeqCst);
        if *self.away.lock() {
            return future::ready(Err(OriginError::Unavailable("connection refused".into()))).boxed();
        }
        let found = self.contents.lock().iter().find(|content| Digest::of(content) == digest).cloned();
        let stream = found.map(|content| stream::iter([Ok(content.into())]).boxed());
        future::ready(Ok(stream)).boxed()
    }

    fn renew(&self, _: Digest) -> BoxFuture<'_, Result<bool, OriginError>> {
        unreachable!("a host writes nothing")
    }

    fn upload(&self, _: Digest, _: u64, _: ContentStream) -> BoxFuture<'_, Result<(), OriginError>> {
        unreachable!("a host writes nothing")
    }
}

fn joined(bytes_max: u64) -> (WasmHostFixture, Arc<Server>) {
    let folder = tempfile::tempdir().unwrap();
    let server = Arc::new(Server::default());
    let config = CacheConfig { bytes_max, ..CacheConfig::default() };
    let artifacts = Artifacts::open_cache(folder.path().join("artifacts"), server.clone(), config).unwrap();
    (WasmHostFixture::on(folder, artifacts, small()), server)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_component_is_fetched_before_it_is_reported_missing() {
    let (fixture, server) = joined(u64::MAX);
    let component = Digest::of(&handler(ANSWERS));
    let function = fixture.host.prepare(spec("f", component));
    assert_eq!(call(&function, get("/")).await.err(), Some(CallError::ComponentMissing(component)));
    server.add(handler(ANSWERS));
    server.be_away(true);
    let error = call(&function, get("/")).await.err().unwrap();
    let is_told =
        matches!(&error, CallError::ComponentUnavailable { why, .. } if why.contains("connection refused"));
    assert!(is_told, "{error}");
    server.be_away(false);
    assert_eq!(ask(&function, "/").await.0, 200);
    // Loading it again needs no server.
    server.be_away(true);
    let fetches = server.fetches();
    function.unload();
    assert_eq!(ask(&function, "/").await.0, 200);
    assert_eq!(server.fetches(), fetches);
    let calls = |outcome: &str| {
        let labels =
            format!("mayfly_wasm_calls_total{{namespace=\"default\",function=\"f\",outcome=\"{outcome}\"}}");
        metric(&fixture.metrics(), &labels)
    };
    assert_eq!((calls("Missing"), calls("NotReady"), calls("Answered")), (1.0, 1.0, 2.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_told_why_its_component_cannot_be_fetched() {
    let (fixture, server) = joined(u64::MAX);
    let component = server.add(handler(ANSWERS));
    server.be_away(true);
    let pod = Pod::new(&fixture, component, &[]).await;
    let error = pod.start().await.unwrap_err();
    let expected = format!(
        "artifact {component} cannot be fetched now: the server's artifact store is not available: connection refused"
    );
    assert_eq!(error, RuntimeError::ImageMissing(expected));
    server.be_away(false);
    pod.start().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_component_in_memory_is_not_evicted() {
    let (fixture, server) = joined(0);
    let component = server.add(handler(ANSWERS));
    let function = fixture.host.prepare(spec("f", component));
    ask(&function, "/").await;
    // A guest may hold its component briefly after its answer.
    fixture.settled().await;
    fixture.artifacts.evict().await.unwrap();
    assert!(compiled(fixture.folder.path()).exists());
    function.unload();
    eventually("it is not in memory", || metric(&fixture.metrics(), "mayfly_wasm_components_loaded ") == 0.0)
        .await;
    assert_eq!(fixture.artifacts.evict().await.unwrap(), 1);
    assert!(fixture.artifacts.path(&component).is_none());
    ask(&function, "/").await;
    assert_eq!(server.fetches(), 2);
}
