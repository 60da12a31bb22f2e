//! Server-side apply: a patch with exactly the fields that its manager owns.

use hashbrown::HashMap;
use mayfly_api::validation::FieldError;

use super::{ObjectUpdate, Part, WriteOutcome, WriteRequest, key, set_type, validate_schema};
use crate::{
    decode::Decoded, managed, meta, object::Object, schema::normalise, server::ServerState, status::ApiError,
};

impl ServerState {
    pub(crate) async fn apply(
        &self,
        request: &WriteRequest,
        name: &str,
        part: Part,
        body: Decoded,
        force: bool,
    ) -> Result<WriteOutcome, ApiError> {
        let kind = request.kind;
        if !request.manager.explicit {
            let error = FieldError::required("fieldManager", "is required for apply patch");
            return Err(ApiError::invalid_options("PatchOptions", &[error]));
        }
        let (applied, warnings) = self.applied_object(request, name, body)?;
        let exists = self.store.get(&key(kind, &request.namespace, name)).is_some();
        if !exists && part == Part::Main {
            if !applied.uid().is_empty() {
                let why = format!(
                    "uid mismatch: the provided object specified uid {}, and no existing object was found",
                    applied.uid()
                );
                return Err(ApiError::conflict(kind, name, &why));
            }
            let mut object = managed::apply(request, part, None, &applied, force)?;
            let strict = |why: String| ApiError::bad_request(why);
            validate_schema(kind, &mut object, Vec::new(), request.validation, strict)?;
            let created = self
                .create_change(request, ObjectUpdate { object, warnings: warnings.clone(), applied: true })
                .await;
            // Created concurrently: apply to the created object.
            if !created.as_ref().is_err_and(|error| error.has_reason("AlreadyExists")) {
                return created;
            }
        }
        self.change(request, name, part, |live| {
            let mut object = managed::apply(request, part, Some(live), &applied, force)?;
            validate_schema(kind, &mut object, Vec::new(), request.validation, ApiError::bad_request)?;
            Ok(ObjectUpdate { object, warnings: warnings.clone(), applied: true })
        })
        .await
    }

    /// The applied object, checked against its kind; absent fields are permitted.
    fn applied_object(
        &self,
        request: &WriteRequest,
        name: &str,
        body: Decoded,
    ) -> Result<(Object, Vec<String>), ApiError> {
        let kind = request.kind;
        let serde_json::Value::Object(map) = body.value else {
            return Err(ApiError::bad_request("the applied object is not a map"));
        };
        let mut object = Object(map);
        for field in ["apiVersion", "kind"] {
            if object.str_at(&[field]).is_empty() {
                return Err(ApiError::bad_request(format!("the applied object has no {field}")));
            }
        }
        set_type(kind, &mut object)?;
        if object.at(&["metadata", "managedFields"]).is_some_and(|list| !list.is_null()) {
            return Err(ApiError::bad_request("metadata.managedFields must be nil"));
        }
        let found = normalise(kind, &mut object.0);
        // Fields that Mayfly's own kinds do not have are reported by the field validation, like those of other writes.
        if !kind.custom || kind.definition.is_some() {
            let mut named = Object(object.0.clone());
            meta::set_name_and_namespace(&mut named, kind, &request.namespace, Some(name))?;
            managed::check_declared(kind, &named, &found.unknown)?;
        }
        let cannot = |why: String| {
            let (kind, version) = (kind.kind, kind.version);
            ApiError::bad_request(format!(
                "{kind} in version {version:?} cannot be handled as a {kind}: {why}"
            ))
        };
        let warnings =
            super::check_findings(found, body.duplicates, &HashMap::new(), request.validation, cannot)?.0;
        meta::set_name_and_namespace(&mut object, kind, &request.namespace, Some(name))?;
        Ok((object, warnings))
    }
}
