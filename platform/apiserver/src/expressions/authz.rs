//! The authorizer in expressions: checks of the rights of a request's user, and of service accounts.
//! (Source: `apiserver/pkg/cel/library/authz.go`.)
//!
//! ```text
//! authorizer.group('apps').resource('deployments').namespace('ns').check('create').allowed()
//! authorizer.path('/healthz').check('get').reason()
//! authorizer.serviceAccount('ns', 'name').group('').resource('pods').check('list').allowed()
//! authorizer.requestResource.check('delete').allowed()
//! ```

use std::sync::Arc;

use cel::{
    Env, ExecutionError, Value,
    common::types::{DYN_TYPE, STRING_TYPE},
    objects::Opaque,
};
use mayfly_api::names;

use super::libraries::{CelAnswer, any, declare, failed, string, text};
use crate::{
    access::{GROUP_AUTHENTICATED, User},
    rbac::{AccessDecision, Attributes, RbacIndex},
};

/// Steps that a check costs in the estimate of an expression: it compares a request with the rules of a user's roles.
pub(super) const CHECK_STEPS: u64 = 1000;

/// A user, and the roles by which its rights are decided.
#[derive(Clone, Debug)]
pub(crate) struct Authorizer {
    user: Arc<User>,
    rbac: Arc<RbacIndex>,
}

/// The resource that `authorizer.requestResource` checks: that of the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestResource<'a> {
    pub(crate) group: &'a str,
    pub(crate) resource: &'a str,
    pub(crate) subresource: &'a str,
    pub(crate) namespace: &'a str,
    /// Empty if the server generates the name.
    pub(crate) name: &'a str,
}

impl Authorizer {
    pub(crate) fn new(user: User, rbac: Arc<RbacIndex>) -> Self {
        Self { user: Arc::new(user), rbac }
    }

    /// The values of the variables `authorizer` and `authorizer.requestResource`.
    pub(crate) fn variables(self, request: RequestResource<'_>) -> [(&'static str, Value); 2] {
        let check = ResourceCheck {
            authorizer: self.clone(),
            group: request.group.to_owned(),
            resource: request.resource.to_owned(),
            subresource: request.subresource.to_owned(),
            namespace: request.namespace.to_owned(),
            name: request.name.to_owned(),
        };
        [("authorizer", opaque(self)), ("authorizer.requestResource", opaque(check))]
    }

    fn decide(&self, asked: &Attributes<'_>) -> Decision {
        match self.rbac.authorize(&self.user, asked) {
            AccessDecision::Allowed { reason } => Decision { allowed: true, reason },
            // As upstream, roles that do not exist are a part of the reason, and no error of the check.
            AccessDecision::Refused { errors } if errors.is_empty() => Decision::default(),
            AccessDecision::Refused { errors } => {
                Decision { allowed: false, reason: format!("RBAC: {}", errors.join(", ")) }
            }
        }
    }
}

impl PartialEq for Authorizer {
    fn eq(&self, other: &Self) -> bool {
        self.user == other.user && Arc::ptr_eq(&self.rbac, &other.rbac)
    }
}

impl Eq for Authorizer {}

/// `authorizer.path(PATH)`
#[derive(Clone, Debug, PartialEq, Eq)]
struct PathCheck {
    authorizer: Authorizer,
    path: String,
}

/// `authorizer.group(GROUP)`
#[derive(Clone, Debug, PartialEq, Eq)]
struct GroupCheck {
    authorizer: Authorizer,
    group: String,
}

/// `authorizer.group(GROUP).resource(RESOURCE)`
#[derive(Clone, Debug, PartialEq, Eq)]
struct ResourceCheck {
    authorizer: Authorizer,
    group: String,
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Decision {
    allowed: bool,
    reason: String,
}

impl Opaque for Authorizer {
    fn runtime_type_name(&self) -> &str {
        "kubernetes.authorization.Authorizer"
    }
}

impl Opaque for PathCheck {
    fn runtime_type_name(&self) -> &str {
        "kubernetes.authorization.PathCheck"
    }
}

impl Opaque for GroupCheck {
    fn runtime_type_name(&self) -> &str {
        "kubernetes.authorization.GroupCheck"
    }
}

impl Opaque for ResourceCheck {
    fn runtime_type_name(&self) -> &str {
        "kubernetes.authorization.ResourceCheck"
    }
}

impl Opaque for Decision {
    fn runtime_type_name(&self) -> &str {
        "kubernetes.authorization.Decision"
    }
}

pub(super) fn extension(env: &mut Env) -> Result<(), cel::DeclarationError> {
    declare!(env, member "path", "authorizer_path", DYN_TYPE, vec![STRING_TYPE], path)?;
    declare!(env, member "group", "authorizer_group", DYN_TYPE, vec![STRING_TYPE], group)?;
    let account = vec![STRING_TYPE, STRING_TYPE];
    declare!(env, member "serviceAccount", "authorizer_serviceaccount", DYN_TYPE, account, service_account)?;
    declare!(env, member "resource", "groupcheck_resource", DYN_TYPE, vec![STRING_TYPE], resource)?;
    declare!(env, member "subresource", "resourcecheck_subresource", DYN_TYPE, vec![STRING_TYPE], subresource)?;
    declare!(env, member "namespace", "resourcecheck_namespace", DYN_TYPE, vec![STRING_TYPE], namespace)?;
    declare!(env, member "name", "resourcecheck_name", DYN_TYPE, vec![STRING_TYPE], name)?;
    declare!(env, member "fieldSelector", "authorizer_fieldselector", DYN_TYPE, vec![STRING_TYPE], selector)?;
    declare!(env, member "labelSelector", "authorizer_labelselector", DYN_TYPE, vec![STRING_TYPE], selector)?;
    declare!(env, member "check", "resourcecheck_check", DYN_TYPE, vec![STRING_TYPE], check)?;
    declare!(env, member "allowed", "decision_allowed", DYN_TYPE, any(0), allowed)?;
    declare!(env, member "reason", "decision_reason", DYN_TYPE, any(0), reason)?;
    declare!(env, member "errored", "decision_errored", DYN_TYPE, any(0), errored)?;
    declare!(env, member "error", "decision_error", DYN_TYPE, any(0), error)
}

fn opaque(value: impl Opaque) -> Value {
    Value::Opaque(Arc::new(value))
}

/// The receiver of a member function.
fn receiver<T: Opaque>(values: &[Value]) -> Result<&T, ExecutionError> {
    match values.first() {
        Some(Value::Opaque(value)) => value.downcast_ref::<T>(),
        _ => None,
    }
    .ok_or_else(ExecutionError::missing_argument_or_target)
}

fn path(values: &[Value]) -> CelAnswer {
    let (authorizer, path) = (receiver::<Authorizer>(values)?.clone(), text(values, 1)?.to_owned());
    if path.trim().is_empty() {
        return Err(failed("path", "path must not be empty"));
    }
    Ok(opaque(PathCheck { authorizer, path }))
}

fn group(values: &[Value]) -> CelAnswer {
    let authorizer = receiver::<Authorizer>(values)?.clone();
    Ok(opaque(GroupCheck { authorizer, group: text(values, 1)?.to_owned() }))
}

fn service_account(values: &[Value]) -> CelAnswer {
    let authorizer = receiver::<Authorizer>(values)?;
    let (namespace, name) = (text(values, 1)?, text(values, 2)?);
    if names::dns_subdomain(name).is_err() {
        return Err(failed("serviceAccount", "Invalid service account name"));
    }
    if names::dns_label(namespace).is_err() {
        return Err(failed("serviceAccount", "Invalid service account namespace"));
    }
    let mut user = User::service_account(namespace, name);
    // Upstream's check is not about an authenticated request.
    user.groups.retain(|group| group != GROUP_AUTHENTICATED);
    Ok(opaque(Authorizer::new(user, Arc::clone(&authorizer.rbac))))
}

fn resource(values: &[Value]) -> CelAnswer {
    let GroupCheck { authorizer, group } = receiver::<GroupCheck>(values)?.clone();
    let resource = text(values, 1)?.to_owned();
    if resource.trim().is_empty() {
        return Err(failed("resource", "resource must not be empty"));
    }
    let (subresource, namespace, name) = Default::default();
    Ok(opaque(ResourceCheck { authorizer, group, resource, subresource, namespace, name }))
}

/// The check with one field set to the argument.
fn with(values: &[Value], field: fn(&mut ResourceCheck) -> &mut String) -> CelAnswer {
    let mut check = receiver::<ResourceCheck>(values)?.clone();
    text(values, 1)?.clone_into(field(&mut check));
    Ok(opaque(check))
}

fn subresource(values: &[Value]) -> CelAnswer {
    with(values, |check| &mut check.subresource)
}

fn namespace(values: &[Value]) -> CelAnswer {
    with(values, |check| &mut check.namespace)
}

fn name(values: &[Value]) -> CelAnswer {
    with(values, |check| &mut check.name)
}

/// Roles do not distinguish requests by their selectors.
fn selector(values: &[Value]) -> CelAnswer {
    text(values, 1)?;
    Ok(opaque(receiver::<ResourceCheck>(values)?.clone()))
}

fn check(values: &[Value]) -> CelAnswer {
    let verb = text(values, 1)?;
    if let Ok(check) = receiver::<PathCheck>(values) {
        let asked = Attributes { verb, path: Some(&check.path), ..Attributes::default() };
        return Ok(opaque(check.authorizer.decide(&asked)));
    }
    let check = receiver::<ResourceCheck>(values)?;
    let asked = Attributes {
        verb,
        path: None,
        group: &check.group,
        resource: &check.resource,
        subresource: &check.subresource,
        namespace: &check.namespace,
        name: &check.name,
    };
    Ok(opaque(check.authorizer.decide(&asked)))
}

fn allowed(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(receiver::<Decision>(values)?.allowed))
}

fn reason(values: &[Value]) -> CelAnswer {
    Ok(string(receiver::<Decision>(values)?.reason.as_str()))
}

/// A check by roles has no errors.
fn errored(values: &[Value]) -> CelAnswer {
    receiver::<Decision>(values).map(|_| Value::Bool(false))
}

fn error(values: &[Value]) -> CelAnswer {
    receiver::<Decision>(values).map(|_| string(""))
}
