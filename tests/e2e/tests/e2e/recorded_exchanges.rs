//! Replays exchanges recorded from kube-apiserver 1.28 (see `mayfly-recorded`) against the whole platform, whose
//! controllers act on the objects as those of the recording did.

use anyhow::{Result, ensure};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::BodyExt;
use mayfly_e2e::{Api, Start, full, wait};
use mayfly_recorded::ReplayTarget;
use serde_json::json;

/// The minimum number of matching exchanges, raised as features are implemented.
const STRICT_MIN: usize = 3150;
const LENIENT_MIN: usize = 3212;

#[tokio::test(flavor = "multi_thread")]
async fn the_platform_answers_as_recorded() -> Result<()> {
    let up = Start::default().ready().await?;
    let server = RecordedApi(up.api()?);
    let replayed = mayfly_recorded::run("the_platform_answers_as_recorded", async |scenario, number| {
        mayfly_recorded::replay(&server, &scenario, number).await
    });
    let Some(total) = replayed.await.filter(|_| !mayfly_recorded::is_partial()) else { return Ok(()) };
    ensure!(total.strict >= STRICT_MIN, "{} agree strictly, {STRICT_MIN} did before", total.strict);
    ensure!(total.lenient >= LENIENT_MIN, "{} agree, {LENIENT_MIN} did before", total.lenient);
    Ok(())
}

struct RecordedApi(Api);

impl RecordedApi {
    async fn answer(&self, request: Request<Bytes>) -> Result<Response<Bytes>> {
        let administrator = self.0.request(request.method().clone(), "/").body(())?;
        let mut request = request.map(full);
        for name in [header::HOST, header::AUTHORIZATION] {
            let value = administrator.headers().get(&name).cloned();
            let value = value.unwrap_or(HeaderValue::from_static(""));
            request.headers_mut().entry(name).or_insert(value);
        }
        let (parts, body) = self.0.connect().await?.send_request(request).await?.into_parts();
        // A watch that ends with an error has a partial response.
        let bytes = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        Ok(Response::from_parts(parts, bytes))
    }
}

impl ReplayTarget for RecordedApi {
    const CONTROLLERS: bool = true;

    async fn send(&self, request: Request<Bytes>) -> Response<Bytes> {
        self.answer(request).await.expect("an answer of the server")
    }

    async fn open_namespace(&self, name: &str) {
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        self.0.post("/api/v1/namespaces", &object).await.expect("an answer of the server");
        for path in ["serviceaccounts/default", "configmaps/kube-root-ca.crt"] {
            let path = format!("/api/v1/namespaces/{name}/{path}");
            let look = async || Ok((self.0.get(&path).await?.status == 200).then_some(()));
            wait::until(&path, look).await.expect("the controllers fill a namespace");
        }
    }
}
