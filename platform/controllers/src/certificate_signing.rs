//! CertificateSigningRequests: approved requests of the built-in signers get their certificates.
//!
//! (Behaviour: upstream `pkg/controller/certificates/signer`. Requests are approved by users, with `kubectl
//! certificate approve`, and those of nodes by [`crate::node_approval`].)

use std::{fmt, sync::Arc};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        ByteString,
        api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec},
        jiff::{SignedDuration, Timestamp},
    },
};
use mayfly_informer::{
    Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

/// The signer of users' client certificates for the API server.
const SIGNER_CLIENT: &str = "kubernetes.io/kube-apiserver-client";
/// The signer of nodes' client certificates for the API server.
pub(crate) const SIGNER_NODE_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
/// The signer of nodes' serving certificates.
pub(crate) const SIGNER_NODE_SERVING: &str = "kubernetes.io/kubelet-serving";
/// The validity of a certificate whose request names none (upstream's default).
const DURATION_DEFAULT: SignedDuration = SignedDuration::from_hours(365 * 24);
/// The shortest validity that can be requested.
const DURATION_MIN: SignedDuration = SignedDuration::from_mins(10);
const WORKERS_MAX: usize = 2;

/// Signs a certificate request in PEM for usages and a duration; the error is the reason for the request's condition
/// `Failed`.
pub type Sign = dyn Fn(&str, &[String], SignedDuration) -> Result<String, String> + Send + Sync;

/// Settings of the controller of CertificateSigningRequests.
#[derive(Clone, Default)]
pub struct Config {
    /// `None`: nothing is signed.
    pub sign: Option<Arc<Sign>>,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config").field("signs", &self.sign.is_some()).finish()
    }
}

/// Signs approved requests.
pub(crate) struct CertificateSigningController {
    config: Config,
    client: Client,
    requests: Informer<CertificateSigningRequest>,
}

/// Whether a request is to be signed now: it is approved, has neither a certificate nor failed, and is for a built-in
/// signer.
fn is_due(request: &CertificateSigningRequest) -> bool {
    let Some(status) = &request.status else { return false };
    let has = |kind: &str| status.conditions.iter().flatten().any(|condition| condition.type_ == kind);
    let is_ours =
        [SIGNER_CLIENT, SIGNER_NODE_CLIENT, SIGNER_NODE_SERVING].contains(&&*request.spec.signer_name);
    is_ours && has("Approved") && !has("Denied") && !has("Failed") && status.certificate.is_none()
}

/// The usages of a request if its signer permits them (upstream's `capihelper` and signer rules).
///
/// # Errors
/// The reason for the condition `Failed`.
fn usages(spec: &CertificateSigningRequestSpec) -> Result<&[String], String> {
    let usages = spec.usages.as_deref().unwrap_or_default();
    let is_common = |usage: &str| matches!(usage, "key encipherment" | "digital signature");
    let permitted: &dyn Fn(&str) -> bool = match spec.signer_name.as_str() {
        SIGNER_NODE_SERVING => &|usage| is_common(usage) || usage == "server auth",
        SIGNER_NODE_CLIENT => &|usage| is_common(usage) || usage == "client auth",
        // As upstream: everything but the usages of servers and of signing.
        _ => &|usage| is_common(usage) || usage == "client auth",
    };
    let needed = if spec.signer_name == SIGNER_NODE_SERVING { "server auth" } else { "client auth" };
    if !usages.iter().any(|usage| usage == needed) || !usages.iter().all(|usage| permitted(usage)) {
        return Err(format!(
            "usages did not match those of signer {}: {needed:?} is needed, \"digital signature\" and \
             \"key encipherment\" are permitted",
            spec.signer_name
        ));
    }
    Ok(usages)
}

fn duration(spec: &CertificateSigningRequestSpec) -> SignedDuration {
    let requested = spec.expiration_seconds.map(|seconds| SignedDuration::from_secs(seconds.into()));
    requested.map_or(DURATION_DEFAULT, |requested| requested.clamp(DURATION_MIN, DURATION_DEFAULT))
}

impl CertificateSigningController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        Self { config, client, requests: informers.of() }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        if stop.run_until_cancelled(self.requests.synced()).await.is_none() {
            return;
        }
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.requests.handle(move |change| changed.add(ObjectKey::of(&**change.latest())));
        let controller = Arc::new(self);
        reconcile::run("certificate-signing", queue, WORKERS_MAX, stop, move |key| {
            let controller = controller.clone();
            async move { controller.reconcile(key).await }
        })
        .await;
    }

    async fn reconcile(&self, key: ObjectKey) -> kube::Result<Outcome> {
        let Some(request) = self.requests.get(&key).filter(|request| is_due(request)) else {
            return Ok(Outcome::Done);
        };
        let Some(sign) = &self.config.sign else { return Ok(Outcome::Done) };
        let pem = String::from_utf8_lossy(&request.spec.request.0);
        let signed = usages(&request.spec).and_then(|usages| sign(&pem, usages, duration(&request.spec)));
        let status = match signed {
            Ok(certificate) => json!({"certificate": ByteString(certificate.into_bytes())}),
            Err(message) => {
                let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
                let failed = json!({"type": "Failed", "status": "True", "reason": "SignerValidationFailure",
                    "message": message, "lastUpdateTime": now, "lastTransitionTime": now});
                let conditions = request.status.as_ref().and_then(|status| status.conditions.as_ref());
                let mut conditions = json!(conditions);
                if let Some(conditions) = conditions.as_array_mut() {
                    conditions.push(failed);
                }
                json!({"conditions": conditions})
            }
        };
        // The version that was signed: another approval or denial in between is a conflict.
        let patch =
            json!({"metadata": {"resourceVersion": request.metadata.resource_version}, "status": status});
        let requests: Api<CertificateSigningRequest> = Api::all(self.client.clone());
        match requests.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => Ok(Outcome::Done),
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {
                Ok(Outcome::Done)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(value: serde_json::Value) -> CertificateSigningRequest {
        serde_json::from_value(value).unwrap()
    }

    fn with(signer: &str, status: serde_json::Value) -> CertificateSigningRequest {
        request(
            json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {},
            "spec": {"signerName": signer, "request": "", "usages": ["client auth"]}, "status": status}),
        )
    }

    #[test]
    fn only_approved_requests_of_our_signers_are_signed() {
        let condition = |kind: &str| json!({"type": kind, "status": "True"});
        let approved = json!({"conditions": [condition("Approved")]});
        assert!(is_due(&with(SIGNER_CLIENT, approved.clone())));
        assert!(!is_due(&with("example.com/other", approved)));
        assert!(!is_due(&with(SIGNER_CLIENT, json!({}))));
        for other in ["Denied", "Failed"] {
            assert!(!is_due(&with(
                SIGNER_CLIENT,
                json!({"conditions": [condition("Approved"), condition(other)]})
            )));
        }
        let issued = json!({"conditions": [condition("Approved")], "certificate": "eA=="});
        assert!(!is_due(&with(SIGNER_CLIENT, issued)));
    }

    #[test]
    fn usages_are_those_of_the_signer() {
        let of = |signer: &str, usages: &[&str]| {
            let mut request = with(signer, json!({}));
            request.spec.usages = Some(usages.iter().map(|usage| (*usage).to_owned()).collect());
            super::usages(&request.spec).is_ok()
        };
        assert!(of(SIGNER_CLIENT, &["client auth", "digital signature", "key encipherment"]));
        assert!(!of(SIGNER_CLIENT, &["server auth"]));
        assert!(!of(SIGNER_CLIENT, &["digital signature"]));
        assert!(of(SIGNER_NODE_SERVING, &["server auth", "digital signature"]));
        assert!(!of(SIGNER_NODE_SERVING, &["server auth", "client auth"]));
    }

    #[test]
    fn a_validity_is_at_most_a_year() {
        let mut spec = with(SIGNER_CLIENT, json!({})).spec;
        assert_eq!(duration(&spec), DURATION_DEFAULT);
        for (seconds, expected) in
            [(3_600, SignedDuration::from_hours(1)), (i32::MAX, DURATION_DEFAULT), (1, DURATION_MIN)]
        {
            spec.expiration_seconds = Some(seconds);
            assert_eq!(duration(&spec), expected);
        }
    }
}
