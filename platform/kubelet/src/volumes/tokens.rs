//! Service account tokens for projected volumes: requested from the API server, bound to the pod, renewed in time.

use std::{collections::HashMap, sync::Arc, time::Duration};

use kube::{Api, Client, api::PostParams};
use mayfly_api::k8s::{
    api::{
        authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
        core::v1::{Pod, ServiceAccount, ServiceAccountTokenProjection},
    },
    jiff::Timestamp,
};
use mayfly_runtime::PodUid;
use parking_lot::Mutex;

/// Upstream's default lifetime of a token, in seconds.
const EXPIRATION_SECONDS_DEFAULT: i64 = 3600;
/// A token is renewed after this part of its lifetime, or when it is older than a day (upstream's rule).
const RENEW_AT_PERCENT: i64 = 80;
const AGE_MAX: Duration = Duration::from_hours(24);

/// The audience (empty: the API server) and the lifetime in seconds of a token.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TokenUse {
    audience: String,
    seconds: i64,
}

impl TokenUse {
    pub(super) fn of(source: &ServiceAccountTokenProjection) -> Self {
        Self {
            audience: source.audience.clone().unwrap_or_default(),
            seconds: source.expiration_seconds.unwrap_or(EXPIRATION_SECONDS_DEFAULT),
        }
    }
}

/// The tokens of one pod's volumes.
pub(crate) type PodTokens = HashMap<TokenUse, String>;

#[derive(Clone, Debug)]
struct IssuedToken {
    text: String,
    issued: Timestamp,
    expires: Timestamp,
}

impl IssuedToken {
    fn needs_renewal(&self, now: Timestamp) -> bool {
        let lifetime = self.expires.as_second() - self.issued.as_second();
        let age = now.as_second() - self.issued.as_second();
        age * 100 >= lifetime * RENEW_AT_PERCENT
            || age >= i64::try_from(AGE_MAX.as_secs()).unwrap_or(i64::MAX)
    }
}

/// The tokens of a node's pods.
#[derive(Clone)]
pub(crate) struct ServiceAccountTokens {
    client: Client,
    issued: Arc<Mutex<HashMap<PodUid, HashMap<TokenUse, IssuedToken>>>>,
}

impl ServiceAccountTokens {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, issued: Arc::default() }
    }

    /// The tokens that a pod's volumes project.
    ///
    /// # Errors
    /// A message for the pod's status: the API server issued none.
    pub(crate) async fn of_pod(&self, pod: &Pod) -> Result<PodTokens, String> {
        let uid = PodUid(pod.metadata.uid.clone().unwrap_or_default());
        let mut tokens = PodTokens::new();
        for wanted in projections(pod).map(TokenUse::of) {
            let now = Timestamp::now();
            let known = self.issued.lock().get(&uid).and_then(|of_pod| of_pod.get(&wanted)).cloned();
            if let Some(token) = known.as_ref().filter(|token| !token.needs_renewal(now)) {
                tokens.insert(wanted, token.text.clone());
                continue;
            }
            let token = match (self.request(pod, &wanted).await, known) {
                (Ok(token), _) => token,
                // The old token is still valid: the next refresh retries.
                (Err(_), Some(token)) if token.expires > now => token,
                (Err(why), _) => return Err(why),
            };
            tokens.insert(wanted.clone(), token.text.clone());
            self.issued.lock().entry(uid.clone()).or_default().insert(wanted, token);
        }
        Ok(tokens)
    }

    /// Forgets the tokens of a removed pod.
    pub(crate) fn forget(&self, uid: &PodUid) {
        self.issued.lock().remove(uid);
    }

    async fn request(&self, pod: &Pod, wanted: &TokenUse) -> Result<IssuedToken, String> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
        let account = account.filter(|name| !name.is_empty()).unwrap_or("default");
        let request = TokenRequest {
            spec: TokenRequestSpec {
                audiences: Some(wanted.audience.clone())
                    .filter(|text| !text.is_empty())
                    .into_iter()
                    .collect(),
                expiration_seconds: Some(wanted.seconds),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".into()),
                    kind: Some("Pod".into()),
                    name: pod.metadata.name.clone(),
                    uid: pod.metadata.uid.clone(),
                }),
            },
            ..TokenRequest::default()
        };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let issued = Timestamp::now();
        let answer = accounts.create_token_request(account, &PostParams::default(), &request).await;
        let answer = answer.map_err(|error| {
            format!("failed to fetch token of service account {namespace}/{account}: {error}")
        })?;
        let status = answer.status.ok_or("the API server returned no token")?;
        Ok(IssuedToken { text: status.token, issued, expires: status.expiration_timestamp.0 })
    }
}

/// The tokens that a pod's volumes request.
fn projections(pod: &Pod) -> impl Iterator<Item = &ServiceAccountTokenProjection> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let projected = volumes.filter_map(|volume| volume.projected.as_ref());
    let sources = projected.flat_map(|projected| projected.sources.iter().flatten());
    sources.filter_map(|source| source.service_account_token.as_ref())
}

#[cfg(test)]
mod tests {
    use mayfly_api::k8s::jiff::SignedDuration;

    use super::*;

    #[test]
    fn a_token_is_renewed_before_it_expires_and_once_a_day() {
        let issued: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let token = |seconds| IssuedToken {
            text: String::new(),
            issued,
            expires: issued + SignedDuration::from_secs(seconds),
        };
        let at = |seconds| issued + SignedDuration::from_secs(seconds);
        assert!(!token(1000).needs_renewal(at(799)));
        assert!(token(1000).needs_renewal(at(800)));
        assert!(!token(1 << 30).needs_renewal(at(86_399)));
        assert!(token(1 << 30).needs_renewal(at(86_400)));
    }
}
