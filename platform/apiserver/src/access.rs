//! Authentication: which user a request comes from, and impersonation of other users.

mod websocket;

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderValue, StatusCode, header};
use mayfly_accept::PeerCertificate;
use sha2::{Digest, Sha256};

use crate::{
    rbac::{AccessDecision, Attributes},
    server::ServerState,
    status::ApiError,
};

pub(crate) use self::websocket::remove_bearer;

/// The group that may do everything.
const GROUP_ADMIN: &str = "system:masters";
pub(crate) const GROUP_AUTHENTICATED: &str = "system:authenticated";
pub(crate) const GROUP_NODES: &str = "system:nodes";
const NODE_PREFIX: &str = "system:node:";
const GROUP_SERVICE_ACCOUNTS: &str = "system:serviceaccounts";
const SERVICE_ACCOUNT_PREFIX: &str = "system:serviceaccount:";
const ANONYMOUS: &str = "system:anonymous";
const GROUP_UNAUTHENTICATED: &str = "system:unauthenticated";
/// The administrator's name, as it is in the kubeconfig.
const ADMIN: &str = "mayfly-admin";

/// An authenticated user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
    /// Whether the user is a component of this process, whose requests are exempt from the limits of network
    /// requests.
    in_process: bool,
}

impl User {
    /// The identity of a part of the platform in the same process, with full rights.
    pub fn in_process(name: impl Into<String>) -> Self {
        Self { in_process: true, ..Self::admin(name) }
    }

    /// The identity of a part of the platform in the same process, with the rights of the roles bound to its name.
    /// `system:node:NAME` is a member of `system:nodes`.
    pub fn component(name: impl Into<String>) -> Self {
        let name = name.into();
        let nodes = name.starts_with(NODE_PREFIX).then(|| GROUP_NODES.to_owned());
        let groups = nodes.into_iter().chain([GROUP_AUTHENTICATED.to_owned()]).collect();
        Self { in_process: true, ..Self::named(name, groups) }
    }

    pub(crate) fn named(name: impl Into<String>, groups: Vec<String>) -> Self {
        Self { name: name.into(), groups, ..Self::default() }
    }

    /// A user that an authenticator has identified, with these groups.
    pub(crate) fn authenticated(name: impl Into<String>, mut groups: Vec<String>) -> Self {
        groups.push(GROUP_AUTHENTICATED.to_owned());
        Self::named(name, groups)
    }

    fn admin(name: impl Into<String>) -> Self {
        Self::named(name, vec![GROUP_ADMIN.into(), GROUP_AUTHENTICATED.into()])
    }

    /// The user of a service account.
    pub(crate) fn service_account(namespace: &str, name: &str) -> Self {
        let groups = vec![
            GROUP_SERVICE_ACCOUNTS.to_owned(),
            format!("{GROUP_SERVICE_ACCOUNTS}:{namespace}"),
            GROUP_AUTHENTICATED.to_owned(),
        ];
        Self::named(format!("{SERVICE_ACCOUNT_PREFIX}{namespace}:{name}"), groups)
    }

    /// The name of the node that this user is; `None` for users that are no nodes, and for components of this process.
    /// Empty for a member of the nodes' group that is not named `system:node:NAME`.
    pub(crate) fn node(&self) -> Option<&str> {
        let is_node = !self.in_process && self.groups.iter().any(|group| group == GROUP_NODES);
        is_node.then(|| self.name.strip_prefix(NODE_PREFIX).unwrap_or_default())
    }

    pub(crate) fn is_in_process(&self) -> bool {
        self.in_process
    }

    /// Members of `system:masters` may do everything.
    pub(crate) fn is_master(&self) -> bool {
        self.groups.iter().any(|group| group == GROUP_ADMIN)
    }
}

/// Compares the administrator's token, by its digest.
pub(crate) struct Authenticator {
    admin: [u8; 32],
}

impl Authenticator {
    pub(crate) fn new(token: &str) -> Self {
        Self { admin: Sha256::digest(token.as_bytes()).into() }
    }

    fn is_admin(&self, token: &str) -> bool {
        // Comparing digests makes the time of the comparison independent of the token.
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        !token.is_empty() && digest == self.admin
    }
}

/// The bearer token of a request.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let header = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

impl ServerState {
    /// The user of a request: of the connection's client certificate, else of the bearer token, which is in the header
    /// `Authorization` or, of a WebSocket, a subprotocol.
    pub(crate) fn authenticate(
        &self,
        headers: &HeaderMap,
        certificate: Option<&PeerCertificate>,
    ) -> Result<User, ApiError> {
        let authority = self.config.client_authority.as_ref();
        if let (Some(authority), Some(PeerCertificate(certificate))) = (authority, certificate)
            && let Some(user) = authority.user(certificate)
        {
            return Ok(user);
        }
        let token = bearer(headers).map(str::to_owned).or_else(|| websocket::bearer(headers));
        let token = token.ok_or_else(ApiError::unauthorized)?;
        if self.authenticator.is_admin(&token) {
            return Ok(User::admin(ADMIN));
        }
        if let Some(user) = self.bootstrap_user(&token) {
            return Ok(user);
        }
        let verified = self.tokens.verify(self, &token, &[]).map_err(|_| ApiError::unauthorized())?;
        Ok(verified.user)
    }

    /// The user of a request: `user`, or the impersonated one (`kubectl --as`) if `user` has the verb `impersonate`
    /// on every impersonated attribute.
    pub(crate) fn impersonated(&self, user: User, headers: &HeaderMap, path: &str) -> Result<User, ApiError> {
        let Some(wanted) = Impersonation::parse(headers, path)? else { return Ok(user) };
        for (resource, group, namespace, name) in wanted.checks() {
            let (plural, subresource) = resource.split_once('/').unwrap_or((resource.as_str(), ""));
            let asked = Attributes {
                verb: "impersonate",
                group,
                resource: plural,
                subresource,
                namespace,
                name,
                ..Attributes::default()
            };
            let decision = self.authorize(&user, &asked);
            if !decision.is_allowed() {
                return Err(refused(&user, &asked, &decision));
            }
        }
        Ok(User { in_process: user.in_process, ..wanted.user() })
    }
}

/// The impersonation headers of a request.
struct Impersonation {
    name: String,
    uid: Option<String>,
    groups: Vec<String>,
    extra: BTreeMap<String, Vec<String>>,
}

impl Impersonation {
    fn parse(headers: &HeaderMap, path: &str) -> Result<Option<Self>, ApiError> {
        // A value that is left out would give the request other rights, down to those of its sender.
        let text = |value: &HeaderValue| match std::str::from_utf8(value.as_bytes()) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(ApiError::of_filter(path, "an impersonation header is not UTF-8")),
        };
        let texts = |name: &str| headers.get_all(name).iter().map(text).collect::<Result<Vec<_>, _>>();
        let name = texts("impersonate-user")?.into_iter().find(|name| !name.is_empty());
        let (uid, groups) = (texts("impersonate-uid")?.into_iter().next(), texts("impersonate-group")?);
        let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (key, value) in headers {
            let Some(key) = key.as_str().strip_prefix("impersonate-extra-") else { continue };
            let key = percent_decoded(key);
            extra.entry(key).or_default().push(text(value)?);
        }
        match name {
            Some(name) => Ok(Some(Self { name, uid, groups, extra })),
            None if uid.is_none() && groups.is_empty() && extra.is_empty() => Ok(None),
            None => {
                // The references as Go prints them: kind, namespace, name, uid, version, revision, path.
                let authentication = "authentication.k8s.io/v1";
                let mut asked: Vec<_> =
                    groups.iter().map(|group| format!("{{Group  {group}    }}")).collect();
                for (key, values) in &extra {
                    let of_value = |value| format!("{{UserExtra  {value}  {authentication}  {key}}}");
                    asked.extend(values.iter().map(of_value));
                }
                asked.extend(uid.iter().map(|uid| format!("{{UID  {uid}  {authentication}  }}")));
                let why = format!("requested [{}] without impersonating a user", asked.join(" "));
                Err(ApiError::of_filter(path, &why))
            }
        }
    }

    /// The checks of an impersonation: resource, its group, namespace and name.
    fn checks(&self) -> Vec<(String, &'static str, &str, &str)> {
        let mut checks = Vec::new();
        match self.name.strip_prefix(SERVICE_ACCOUNT_PREFIX).and_then(|rest| rest.split_once(':')) {
            Some((namespace, name)) => checks.push(("serviceaccounts".to_owned(), "", namespace, name)),
            None => checks.push(("users".to_owned(), "", "", self.name.as_str())),
        }
        let authentication = "authentication.k8s.io";
        checks.extend(self.uid.iter().map(|uid| ("uids".to_owned(), authentication, "", uid.as_str())));
        checks.extend(self.groups.iter().map(|group| ("groups".to_owned(), "", "", group.as_str())));
        for (key, values) in &self.extra {
            let resource = format!("userextras/{key}");
            checks.extend(values.iter().map(|value| (resource.clone(), authentication, "", value.as_str())));
        }
        checks
    }

    fn user(self) -> User {
        let mut groups = self.groups;
        if groups.is_empty()
            && let Some((namespace, name)) =
                self.name.strip_prefix(SERVICE_ACCOUNT_PREFIX).and_then(|rest| rest.split_once(':'))
        {
            groups = User::service_account(namespace, name).groups;
        }
        let everyone = match self.name == ANONYMOUS {
            true => GROUP_UNAUTHENTICATED,
            false => GROUP_AUTHENTICATED,
        };
        if !groups.iter().any(|group| group == GROUP_AUTHENTICATED || group == GROUP_UNAUTHENTICATED) {
            groups.push(everyone.to_owned());
        }
        User { uid: self.uid.unwrap_or_default(), extra: self.extra, ..User::named(self.name, groups) }
    }
}

fn percent_decoded(text: &str) -> String {
    let pair = format!("k={}", text.replace('+', "%2B"));
    let decoded = url::form_urlencoded::parse(pair.as_bytes()).next().map(|(_, value)| value.into_owned());
    decoded.unwrap_or_else(|| text.to_owned())
}

/// The refusal in the form of upstream's `apiserver/pkg/endpoints/handlers/responsewriters`.
pub(crate) fn refused(user: &User, asked: &Attributes<'_>, decision: &AccessDecision) -> ApiError {
    let mut why = String::new();
    if let AccessDecision::Refused { errors } = decision
        && !errors.is_empty()
    {
        why = match errors.as_slice() {
            [one] => format!(": RBAC: {one}"),
            several => format!(": RBAC: [{}]", several.join(", ")),
        };
    }
    let (name, verb) = (&user.name, asked.verb);
    if let Some(path) = asked.path {
        let message = format!("forbidden: User {name:?} cannot {verb} path {path:?}{why}");
        let mut error = ApiError::new(StatusCode::FORBIDDEN, "Forbidden", message);
        error.details = Some(Box::default());
        return error;
    }
    let resource = match asked.subresource {
        "" => asked.resource.to_owned(),
        subresource => format!("{}/{subresource}", asked.resource),
    };
    let scope = match asked.namespace {
        "" => "at the cluster scope".to_owned(),
        namespace => format!("in the namespace {namespace:?}"),
    };
    let group = asked.group;
    let qualified = match group {
        "" => asked.resource.to_owned(),
        group => format!("{}.{group}", asked.resource),
    };
    let object = match asked.name {
        "" => String::new(),
        name => format!(" {name:?}"),
    };
    let message = format!(
        "{qualified}{object} is forbidden: User {name:?} cannot {verb} resource {resource:?} in API group {group:?} {scope}{why}"
    );
    ApiError::new(StatusCode::FORBIDDEN, "Forbidden", message).about_resource(
        group,
        asked.resource,
        asked.name,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_administrators_token_is_compared_whole() {
        let authenticator = Authenticator::new("secret");
        assert!(authenticator.is_admin("secret"));
        for wrong in ["other", "", "secre", "secrets"] {
            assert!(!authenticator.is_admin(wrong), "{wrong}");
        }
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            bearer(&headers).map(str::to_owned)
        };
        assert_eq!(with("Bearer secret"), Some("secret".into()));
        assert_eq!(with("bearer secret"), Some("secret".into()));
        assert_eq!(with("Basic secret"), None);
        assert_eq!(with("secret"), None);
    }

    #[test]
    fn impersonated_users_have_the_groups_of_what_they_are() {
        let headers = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
            pairs
                .iter()
                .map(|(name, value)| {
                    (header::HeaderName::from_static(name), header::HeaderValue::from_static(value))
                })
                .collect()
        };
        let parse = |pairs: &[(&'static str, &'static str)]| Impersonation::parse(&headers(pairs), "/api");
        assert!(parse(&[]).unwrap().is_none());
        assert!(parse(&[("impersonate-group", "g")]).is_err());
        let user = parse(&[("impersonate-user", "system:serviceaccount:a:b")]).unwrap().unwrap();
        assert_eq!(user.checks(), [("serviceaccounts".to_owned(), "", "a", "b")]);
        assert_eq!(user.user(), User::service_account("a", "b"));
        let user = parse(&[("impersonate-user", "u"), ("impersonate-extra-scopes", "x")]).unwrap().unwrap();
        assert_eq!(user.checks()[1].0, "userextras/scopes");
        assert_eq!(user.user().groups, [GROUP_AUTHENTICATED]);
        let user = parse(&[("impersonate-user", ANONYMOUS)]).unwrap().unwrap();
        assert_eq!(user.user().groups, [GROUP_UNAUTHENTICATED]);
        let named = |name: &[u8]| {
            let name = header::HeaderValue::from_bytes(name).unwrap();
            Impersonation::parse(&HeaderMap::from_iter([("impersonate-user".parse().unwrap(), name)]), "/api")
        };
        assert_eq!(named("jürgen".as_bytes()).unwrap().unwrap().user().name, "jürgen");
        assert!(named(b"j\xfcrgen").is_err(), "not the request of its sender");
    }

    #[test]
    fn parts_of_the_process_have_their_own_rights() {
        assert!(User::in_process("x").is_master());
        let node = User::component("system:node:n");
        assert!(!node.is_master() && node.groups.contains(&GROUP_NODES.to_owned()));
        assert_eq!(node.node(), None, "not restricted");
    }

    #[test]
    fn nodes_are_named_in_their_group() {
        let user = |name: &str, group: &str| User::authenticated(name, vec![group.to_owned()]);
        assert_eq!(user("system:node:n", GROUP_NODES).node(), Some("n"));
        assert_eq!(user("system:node:", GROUP_NODES).node(), Some(""));
        assert_eq!(user("jane", GROUP_NODES).node(), Some(""));
        assert_eq!(user("system:node:n", "devs").node(), None);
    }
}
