//! Who asks, and what they may do.

use http::{HeaderMap, StatusCode, header};
use sha2::{Digest, Sha256};

use crate::status::ApiError;

/// The group that may do everything.
const GROUP_ADMIN: &str = "system:masters";
const GROUP_AUTHENTICATED: &str = "system:authenticated";
/// The administrator's name, as it is in the kubeconfig.
const ADMIN: &str = "mayfly-admin";

/// An authenticated user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub groups: Vec<String>,
    /// Part of this process: not counted against the limits of the network.
    in_process: bool,
}

impl User {
    /// A part of the platform that runs in the same process, with full rights.
    pub fn in_process(name: impl Into<String>) -> Self {
        Self { in_process: true, ..Self::admin(name) }
    }

    fn admin(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            groups: vec![GROUP_ADMIN.into(), GROUP_AUTHENTICATED.into()],
            in_process: false,
        }
    }

    pub(crate) fn is_in_process(&self) -> bool {
        self.in_process
    }
}

/// Knows the tokens, as digests.
pub(crate) struct Authenticator {
    admin: [u8; 32],
}

impl Authenticator {
    pub(crate) fn new(token: &str) -> Self {
        Self { admin: Sha256::digest(token.as_bytes()).into() }
    }

    /// The user of a bearer token.
    pub(crate) fn user(&self, headers: &HeaderMap) -> Result<User, ApiError> {
        let header = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let (scheme, token) =
            header.and_then(|text| text.split_once(' ')).ok_or_else(ApiError::unauthorized)?;
        // Digests are compared, so the time taken says nothing about the token.
        let digest: [u8; 32] = Sha256::digest(token.trim().as_bytes()).into();
        let is_admin = !token.trim().is_empty() && digest == self.admin;
        if scheme.eq_ignore_ascii_case("bearer") && is_admin {
            return Ok(User::admin(ADMIN));
        }
        Err(ApiError::unauthorized())
    }
}

/// What may be asked of whom. The one place that decides: today administrators may do everything, and others
/// nothing.
pub(crate) fn is_allowed(user: &User) -> bool {
    user.groups.iter().any(|group| group == GROUP_ADMIN)
}

/// The user that a request is to be answered for: `kubectl --as`, which an administrator may ask for.
pub(crate) fn impersonated(user: User, headers: &HeaderMap) -> Result<User, ApiError> {
    let text = |name: &str| -> Vec<String> {
        headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).map(str::to_owned).collect()
    };
    let (names, mut groups) = (text("impersonate-user"), text("impersonate-group"));
    let name = match (names.as_slice(), groups.is_empty()) {
        ([], true) => return Ok(user),
        ([name], _) => name.clone(),
        _ => {
            return Err(ApiError::bad_request(
                "requested groups or several users without impersonating one user",
            ));
        }
    };
    if !is_allowed(&user) {
        return Err(refused(&user, &format!("impersonate user {name:?}")));
    }
    groups.push(GROUP_AUTHENTICATED.into());
    Ok(User { name, groups, in_process: user.in_process })
}

pub(crate) fn refused(user: &User, what: &str) -> ApiError {
    let message = format!("forbidden: User {:?} cannot {what}", user.name);
    ApiError::new(StatusCode::FORBIDDEN, "Forbidden", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_opens() {
        let authenticator = Authenticator::new("secret");
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            authenticator.user(&headers)
        };
        assert_eq!(with("Bearer secret").unwrap().name, ADMIN);
        assert!(is_allowed(&with("bearer secret").unwrap()));
        for wrong in ["Bearer other", "Bearer ", "Basic secret", "secret"] {
            assert!(with(wrong).is_err(), "{wrong}");
        }
        assert!(authenticator.user(&HeaderMap::new()).is_err());
        assert!(!is_allowed(&User { name: "x".into(), groups: vec![], in_process: false }));
    }
}
