//! An API server with `/cacerts` and CertificateSigningRequests only.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{ConnectInfo, Path, State, connect_info::Connected},
    response::{IntoResponse as _, Response},
    routing::{get, post},
    serve::{IncomingStream, Listener},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, StatusCode};
use jiff::Timestamp;
use mayfly_join::{CaHash, JoinToken};
use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig, crypto::ring, pki_types::PrivateKeyDer, server::WebPkiClientVerifier,
    },
    server::TlsStream,
};
use x509_parser::{certificate::X509Certificate, prelude::FromDer as _};

/// What happens to requests.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum SigningMode {
    Sign,
    Deny,
    Fail,
    Wait,
}

/// The state of the server.
pub(crate) struct SigningServerState {
    pub(crate) decision: SigningMode,
    /// The validity of certificates from now, in seconds.
    pub(crate) validity_s: u64,
    /// The user and the signer of every created request.
    pub(crate) created: Vec<(String, String)>,
    /// Bearer tokens that were sent.
    pub(crate) tokens: Vec<String>,
    cacerts: String,
    objects: BTreeMap<String, Value>,
    bearer: String,
    issuer: Issuer<'static, KeyPair>,
}

type SharedState = Arc<Mutex<SigningServerState>>;

pub(crate) struct TestServer {
    pub(crate) url: String,
    pub(crate) token: JoinToken,
    pub(crate) state: SharedState,
    task: JoinHandle<()>,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct TlsListener {
    tcp: TcpListener,
    tls: TlsAcceptor,
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let Ok((stream, address)) = self.tcp.accept().await else { continue };
            if let Ok(stream) = self.tls.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}

/// The client's certificate, in DER.
#[derive(Clone)]
struct Peer(Option<Vec<u8>>);

impl Connected<IncomingStream<'_, TlsListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TlsListener>) -> Self {
        let certificates = stream.io().get_ref().1.peer_certificates();
        Self(certificates.map(|certificates| certificates[0].to_vec()))
    }
}

fn authority() -> (rcgen::Certificate, Issuer<'static, KeyPair>) {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "test-ca");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap(), Issuer::new(params, key))
}

impl TestServer {
    pub(crate) async fn start() -> Self {
        let (ca, issuer) = authority();
        let (stranger, _) = authority();
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        let certificate = certificate.signed_by(&key, &issuer).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(ca.der().clone()).unwrap();
        let provider = Arc::new(ring::default_provider());
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
        let clients = clients.allow_unauthenticated().build().unwrap();
        let tls =
            ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let tls = tls
            .with_client_cert_verifier(clients)
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", tcp.local_addr().unwrap());
        let listener = TlsListener { tcp, tls: TlsAcceptor::from(Arc::new(tls)) };
        let token = JoinToken::generate(CaHash::of_der(ca.der()), &mut rand::rng());
        let state = Arc::new(Mutex::new(SigningServerState {
            decision: SigningMode::Sign,
            validity_s: 3_600,
            created: Vec::new(),
            tokens: Vec::new(),
            cacerts: stranger.pem() + &ca.pem(),
            objects: BTreeMap::new(),
            bearer: token.bearer(),
            issuer,
        }));
        const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
        let router = Router::new()
            .route("/cacerts", get(cacerts))
            .route("/user", get(user))
            .route(REQUESTS, post(create))
            .route(&format!("{REQUESTS}/{{name}}"), get(read))
            .with_state(state.clone());
        let service = router.into_make_service_with_connect_info::<Peer>();
        let task = tokio::spawn(async move { axum::serve(listener, service).await.unwrap() });
        Self { url, token, state, task }
    }

    /// Ends the server, and waits until its port is closed.
    pub(crate) async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    /// Signs requests from now on; `validity_s` in seconds.
    pub(crate) fn sign_for(&self, validity_s: u64) {
        let mut state = self.state.lock();
        (state.decision, state.validity_s) = (SigningMode::Sign, validity_s);
    }

    /// The users that created requests, in order.
    pub(crate) fn users(&self) -> Vec<String> {
        self.state.lock().created.iter().map(|(user, _)| user.clone()).collect()
    }
}

async fn cacerts(State(state): State<SharedState>) -> String {
    state.lock().cacerts.clone()
}

/// The user of the request, and its certificate's serial number.
async fn user(ConnectInfo(peer): ConnectInfo<Peer>) -> String {
    let der = peer.0.unwrap_or_default();
    X509Certificate::from_der(&der).map_or_else(
        |_| "nobody".to_owned(),
        |(_, certificate)| format!("{} {}", certificate.subject(), certificate.raw_serial_as_string()),
    )
}

fn status(code: StatusCode, reason: &str) -> Response {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
        "message": reason, "code": code.as_u16()});
    (code, Json(body)).into_response()
}

fn authenticated(state: &mut SigningServerState, headers: &HeaderMap, peer: &Peer) -> Option<String> {
    if let Some(header) = headers.get("authorization") {
        let token = header.to_str().unwrap().trim_start_matches("Bearer ").to_owned();
        state.tokens.push(token.clone());
        return (token == state.bearer).then(|| "system:bootstrap".to_owned());
    }
    let (_, certificate) = X509Certificate::from_der(peer.0.as_deref()?).ok()?;
    certificate.subject().iter_common_name().next().map(|name| name.as_str().unwrap().to_owned())
}

async fn create(
    State(state): State<SharedState>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
    Json(mut object): Json<Value>,
) -> Response {
    let mut state = state.lock();
    let Some(user) = authenticated(&mut state, &headers, &peer) else {
        return status(StatusCode::UNAUTHORIZED, "Unauthorized");
    };
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    if state.objects.contains_key(&name) {
        return status(StatusCode::CONFLICT, "AlreadyExists");
    }
    object["status"] = json!({});
    state.created.push((user, object["spec"]["signerName"].as_str().unwrap().to_owned()));
    state.objects.insert(name, object.clone());
    (StatusCode::CREATED, Json(object)).into_response()
}

async fn read(
    State(state): State<SharedState>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Response {
    let mut state = state.lock();
    if authenticated(&mut state, &headers, &peer).is_none() {
        return status(StatusCode::UNAUTHORIZED, "Unauthorized");
    }
    let Some(mut object) = state.objects.get(&name).cloned() else {
        return status(StatusCode::NOT_FOUND, "NotFound");
    };
    let condition =
        |kind: &str| json!([{"type": kind, "status": "True", "message": format!("test: {kind}")}]);
    if object["status"] == json!({}) {
        object["status"] = match state.decision {
            SigningMode::Sign => {
                let certificate = sign(&state, &object["spec"]);
                json!({"conditions": condition("Approved"), "certificate": STANDARD.encode(certificate)})
            }
            SigningMode::Deny => json!({"conditions": condition("Denied")}),
            SigningMode::Fail => json!({"conditions": condition("Failed")}),
            SigningMode::Wait => json!({}),
        };
        state.objects.insert(name, object.clone());
    }
    if state.decision == SigningMode::Wait && object["status"] == json!({}) {
        object["status"] = json!({"conditions": condition("NodeNameInUse")});
    }
    Json(object).into_response()
}

/// Signs as the real signer does: the usages of the request, its names, a start in the past.
fn sign(state: &SigningServerState, spec: &Value) -> String {
    let pem = String::from_utf8(STANDARD.decode(spec["request"].as_str().unwrap()).unwrap()).unwrap();
    let mut request = CertificateSigningRequestParams::from_pem(&pem).unwrap();
    let usages = spec["usages"].as_array().unwrap();
    request.params.is_ca = IsCa::ExplicitNoCa;
    request.params.use_authority_key_identifier_extension = true;
    request.params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    for (usage, purpose) in [
        ("client auth", ExtendedKeyUsagePurpose::ClientAuth),
        ("server auth", ExtendedKeyUsagePurpose::ServerAuth),
    ] {
        if usages.iter().any(|known| known == usage) {
            request.params.extended_key_usages.push(purpose);
        }
    }
    let now = Duration::from_secs(Timestamp::now().as_second().unsigned_abs());
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    request.params.not_before = epoch + now - Duration::from_secs(300);
    request.params.not_after = epoch + now + Duration::from_secs(state.validity_s);
    request.signed_by(&state.issuer).unwrap().pem()
}
