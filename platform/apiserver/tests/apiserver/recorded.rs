//! Replays exchanges recorded from kube-apiserver 1.28 (see `mayfly-recorded`) on servers without controllers, each
//! scenario on its own, and asserts a floor.

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::BodyExt;
use mayfly_recorded::ReplayTarget;
use serde_json::json;

use crate::support::{Fixture, TOKEN};

/// Exchanges that agree, at least: raised with what is implemented.
const STRICT_MIN: usize = 2985;
const LENIENT_MIN: usize = 3041;

#[tokio::test(flavor = "multi_thread")]
async fn recorded_exchanges_agree() {
    let total = mayfly_recorded::run("recorded_exchanges_agree", async |scenario, number| {
        let with_accounts = |config: &mut mayfly_apiserver::Config| {
            config.service_accounts_required = true;
            config.service_account_token_volumes = true;
        };
        let fixture = Fixture::with(with_accounts, |_| {}).await;
        mayfly_recorded::replay(&fixture, &scenario, number).await
    });
    let Some(total) = total.await.filter(|_| !mayfly_recorded::is_partial()) else { return };
    assert!(total.strict >= STRICT_MIN, "{} agree strictly, {STRICT_MIN} did before", total.strict);
    assert!(total.lenient >= LENIENT_MIN, "{} agree, {LENIENT_MIN} did before", total.lenient);
}

impl ReplayTarget for Fixture {
    const CONTROLLERS: bool = false;

    async fn send(&self, request: Request<Bytes>) -> Response<Bytes> {
        let mut request = request.map(Body::from);
        let token = HeaderValue::try_from(format!("Bearer {TOKEN}")).unwrap();
        request.headers_mut().entry(header::AUTHORIZATION).or_insert(token);
        let (parts, body) = Fixture::send(self, request).await.into_parts();
        // A watch that ends with an error has a response up to there.
        let bytes = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        Response::from_parts(parts, bytes)
    }

    async fn open_namespace(&self, name: &str) {
        self.call("POST", "/api/v1/namespaces", json!({"metadata": {"name": name}})).await;
        let path = format!("/api/v1/namespaces/{name}");
        let account = json!({"metadata": {"name": "default"}});
        self.call("POST", &format!("{path}/serviceaccounts"), account).await;
        let certificate = json!({"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": "x"}});
        self.call("POST", &format!("{path}/configmaps"), certificate).await;
    }
}
