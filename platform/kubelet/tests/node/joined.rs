//! A node that joined a server: its artifact store is a cache, filled over a socket.

use std::{fs, io, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use http_body_util::BodyExt as _;
use kube::{Client, client::Body};
use mayfly_api::{
    Digest,
    job_io::{ANNOTATION_INPUTS, ANNOTATION_OUTPUTS, Collected, Outputs},
};
use mayfly_apiserver::{ApiServer, User};
use mayfly_artifacts::{ArtifactOrigin as _, Artifacts, CacheConfig, OriginError};
use mayfly_kubelet::{ApiArtifacts, JobFiles};
use mayfly_runtime::{ContainerId, PodUid};
use serde_json::json;
use tokio::{net::TcpListener, task::JoinHandle};

use crate::harness::{KubeletHarness, phase, state};

/// The API on a socket of loopback, until [`ServerSocket::close`].
struct ServerSocket {
    address: SocketAddr,
    task: Option<JoinHandle<()>>,
}

impl ServerSocket {
    async fn open(api: &ApiServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Self { address, task: Some(serve(listener, api)) }
    }

    /// Refuses connections from now on, and ends the present ones.
    async fn close(&mut self) {
        let task = self.task.take().unwrap();
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }

    async fn reopen(&mut self, api: &ApiServer) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.task = Some(serve(listener, api));
    }

    fn client(&self) -> Client {
        let url = format!("http://{}", self.address).parse().unwrap();
        let mut config = kube::Config::new(url);
        config.auth_info = serde_json::from_value(json!({"token": "token"})).unwrap();
        Client::try_from(config).unwrap()
    }
}

/// A connection for each request: none outlives the listener.
fn serve(listener: TcpListener, api: &ApiServer) -> JoinHandle<()> {
    let service = api.service::<axum::body::Body>();
    let service = tower::service_fn(move |request: http::Request<axum::body::Body>| {
        let mut service = service.clone();
        async move {
            let response = tower::Service::call(&mut service, request).await;
            response.map(|mut response| {
                response.headers_mut().insert("connection", http::HeaderValue::from_static("close"));
                response
            })
        }
    });
    let router = axum::Router::new().fallback_service(service);
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() })
}

/// Reads an artifact of the server.
async fn read(client: &Client, digest: &Digest) -> Bytes {
    let request = http::Request::get(format!("/artifacts/{digest}")).body(Body::empty()).unwrap();
    let response = client.send(request).await.unwrap();
    assert_eq!(response.status(), 200);
    response.into_body().collect().await.unwrap().to_bytes()
}

fn content(bytes: &Bytes) -> mayfly_artifacts::ContentStream {
    let chunks: Vec<_> =
        bytes.chunks(100_000).map(|chunk| io::Result::Ok(Bytes::copy_from_slice(chunk))).collect();
    stream::iter(chunks).boxed()
}

#[tokio::test]
async fn artifacts_are_streamed_both_ways() {
    let cluster = KubeletHarness::stopped().await;
    let mut server = ServerSocket::open(&cluster.api).await;
    let origin = ApiArtifacts::new(server.client());
    let bytes: Bytes = (0..750_000u32).flat_map(u32::to_le_bytes).collect();
    let (digest, length) = (Digest::of(&bytes), bytes.len() as u64);
    assert!(origin.fetch(digest).await.unwrap().is_none());
    assert!(!origin.renew(digest).await.unwrap());
    origin.upload(digest, length, content(&bytes)).await.unwrap();
    assert!(origin.renew(digest).await.unwrap());
    let fetched: Vec<Bytes> = origin.fetch(digest).await.unwrap().unwrap().try_collect().await.unwrap();
    assert!(fetched.len() > 1 && fetched.concat() == bytes);

    // Other bytes than announced: the server keeps nothing, and a retry may succeed.
    let other = Digest::of(b"other");
    let error = origin.upload(other, length, content(&bytes)).await.unwrap_err();
    assert!(matches!(&error, OriginError::Unavailable(why) if why.contains("damaged")), "{error}");
    assert!(!origin.renew(other).await.unwrap());
    // A content that cannot be read here.
    let broken = stream::iter([Ok(bytes.clone()), Err(io::Error::other("unreadable"))]).boxed();
    let error = origin.upload(other, length, broken).await.unwrap_err();
    assert!(matches!(&error, OriginError::Unavailable(_)), "{error}");
    // More than the server takes.
    let large = Bytes::from(vec![0; 65 << 20]);
    let error = origin.upload(Digest::of(&large), large.len() as u64, content(&large)).await.unwrap_err();
    assert!(matches!(&error, OriginError::TooLarge(why) if why.contains("--artifact-limit")), "{error}");

    let stranger = ApiArtifacts::new(cluster.api.client(User::component("stranger")));
    let error = stranger.renew(digest).await.unwrap_err();
    assert!(matches!(&error, OriginError::Refused(why) if why.contains("stranger")), "{error}");

    server.close().await;
    let error = origin.renew(digest).await.unwrap_err();
    assert!(matches!(&error, OriginError::Unavailable(why) if why.contains("refused")), "{error}");
}

#[tokio::test]
async fn a_job_gets_its_inputs_from_the_server_and_stores_its_outputs_there() {
    let cluster = KubeletHarness::stopped().await;
    let mut server = ServerSocket::open(&cluster.api).await;
    let origin = Arc::new(ApiArtifacts::new(server.client()));
    let folder = tempfile::tempdir().unwrap();
    let artifacts =
        Artifacts::open_cache(folder.path().join("artifacts"), origin.clone(), CacheConfig::default())
            .unwrap();
    cluster.run_jobs(JobFiles::new(artifacts.clone(), folder.path().join("jobs")));

    // The inputs are on the server only, also their document.
    let data = Bytes::from(vec![7; 300_000]);
    origin.upload(Digest::of(&data), 300_000, content(&data)).await.unwrap();
    let document = json!({"parameters": {"n": 1}, "artifacts": {"data": {"digest": Digest::of(&data)}}});
    let document = Bytes::from(document.to_string());
    let digest = Digest::of(&document);
    origin.upload(digest, document.len() as u64, content(&document)).await.unwrap();
    server.close().await;
    let never = json!({"restartPolicy": "Never"});
    let pod = cluster.create("job", never, json!({ANNOTATION_INPUTS: digest.to_string()})).await;
    let waiting = |pod: &_| {
        let state = &state(pod)[0]["state"]["waiting"];
        let message = state["message"].as_str().unwrap_or_default();
        state["reason"] == "CreateContainerConfigError" && message.contains("is not available")
    };
    cluster.until("job", "waiting for the server", waiting).await;
    server.reopen(&cluster.api).await;
    cluster.until("job", "running", |pod| phase(pod) == "Running").await;
    let uid = pod.metadata.uid.unwrap();
    let files = folder.path().join("jobs").join(&uid);
    assert_eq!(fs::read(files.join("in/data")).unwrap(), data);

    // Its outputs wait for the server.
    fs::write(files.join("out/answer"), "42").unwrap();
    fs::write(files.join("out/artifacts/copy"), "output").unwrap();
    server.close().await;
    cluster.runtime.exit(&ContainerId { pod: PodUid(uid), name: "main".into(), attempt: 0 }, 0);
    let event = cluster.event("job", "FailedCollect").await;
    assert!(event.message.as_deref().unwrap_or_default().contains("is not available"), "{event:?}");
    let pod = cluster.pods().get("job").await.unwrap();
    assert_eq!(phase(&pod), "Running", "a final phase would say that its outputs are complete");
    server.reopen(&cluster.api).await;
    let pod = cluster.until("job", "over", |pod| phase(pod) == "Succeeded").await;
    let collected = &pod.metadata.annotations.unwrap()[ANNOTATION_OUTPUTS];
    let collected: Collected = serde_json::from_str(collected).unwrap();
    let outputs: Outputs = serde_json::from_slice(&read(&cluster.client, &collected.document).await).unwrap();
    assert_eq!(outputs.parameters["answer"], json!(42));
    assert_eq!(read(&cluster.client, &outputs.artifacts["copy"].digest).await, "output");
    assert_eq!(outputs.problems, [""; 0]);
}
