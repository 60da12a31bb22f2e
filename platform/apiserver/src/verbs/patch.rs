//! `patch`: the four kinds of patches, each applied in the compare-and-swap loop of an update.

use serde_json::Value;

use super::{Outcome, Part, WriteRequest, fit, set_type, update::Change};
use crate::{decode::Decoded, meta, object::Object, registry::Kind, server::Inner, status::ApiError};

/// Most operations of one JSON patch (upstream's limit).
const JSON_PATCH_OPERATIONS_MAX: usize = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PatchForm {
    Json,
    Merge,
    Strategic,
}

impl PatchForm {
    pub(crate) fn from_content_type(text: &str) -> Option<Self> {
        match text {
            "application/json-patch+json" => Some(Self::Json),
            "application/merge-patch+json" => Some(Self::Merge),
            "application/strategic-merge-patch+json" => Some(Self::Strategic),
            _ => None,
        }
    }
}

/// A patch, decoded.
#[derive(Clone, Debug)]
pub(crate) enum Patch {
    Json(json_patch::Patch),
    Merge(Value),
    Strategic(Value),
}

impl Patch {
    pub(crate) fn parse(form: PatchForm, kind: &Kind, body: &Value) -> Result<Self, ApiError> {
        match form {
            PatchForm::Json => {
                let patch: json_patch::Patch = serde_json::from_value(body.clone())
                    .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}")))?;
                if patch.0.len() > JSON_PATCH_OPERATIONS_MAX {
                    let message = format!(
                        "The allowed maximum operations in a JSON patch is {JSON_PATCH_OPERATIONS_MAX}, got {}",
                        patch.0.len()
                    );
                    return Err(ApiError::too_large_patch(message));
                }
                Ok(Self::Json(patch))
            }
            _ if !body.is_object() => {
                Err(ApiError::bad_request("error decoding patch: it is not a JSON object"))
            }
            PatchForm::Merge => Ok(Self::Merge(body.clone())),
            PatchForm::Strategic if kind.custom => Err(ApiError::unsupported_media_type(&[
                "application/json-patch+json",
                "application/merge-patch+json",
                "application/apply-patch+yaml",
            ])),
            PatchForm::Strategic => Ok(Self::Strategic(body.clone())),
        }
    }

    /// The patched object; not yet made to fit its kind.
    fn apply(&self, kind: &Kind, current: &Object) -> Result<Object, ApiError> {
        let mut value = Value::Object(current.0.clone());
        match self {
            Self::Json(patch) => json_patch::patch(&mut value, &patch.0).map_err(|error| {
                ApiError::unprocessable(format!(
                    "the server rejected our request due to an error in our request: {error}"
                ))
            })?,
            Self::Merge(patch) => json_patch::merge(&mut value, patch),
            Self::Strategic(patch) => {
                crate::patch::strategic(kind, &mut value, patch).map_err(ApiError::bad_request)?
            }
        }
        match value {
            Value::Object(map) => Ok(Object(map)),
            _ => Err(ApiError::unprocessable("the patch does not leave an object behind")),
        }
    }
}

impl Inner {
    pub(crate) async fn patch(
        &self,
        request: &WriteRequest,
        name: &str,
        part: Part,
        patch: Patch,
        body: &Decoded,
    ) -> Result<Outcome, ApiError> {
        let kind = request.kind;
        self.change(request, name, part, |current| {
            let mut object = patch.apply(kind, current)?;
            if object.name() != name {
                let error = mayfly_api::validation::FieldError::invalid(
                    "metadata.name",
                    format!("{:?}", object.name()),
                    "field is immutable",
                );
                return Err(ApiError::invalid(kind, name, &[error]));
            }
            set_type(kind, &mut object)?;
            meta::place(&mut object, kind, &request.namespace, Some(name))?;
            let duplicates = body.duplicates.clone();
            let strict = |why: String| ApiError::invalid_patch(&body.value.to_string(), &why);
            let warnings = fit(kind, &mut object, duplicates, request.validation, strict)?;
            Ok(Change { object, warnings, applied: false })
        })
        .await
    }
}
