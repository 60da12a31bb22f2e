//! Requests for subresources that are no part of the object: scale, binding, eviction, token.

use axum::{body::Body, response::Response};
use http::StatusCode;
use serde_json::{Value, json};

use super::{APPLY_CONTENT_TYPE, ResourceRequest, decode_applied};
use crate::{
    admission::{AdmissionAttributes, AdmissionOperation, node_restriction::restrict_posted},
    decode::decode,
    negotiate::{self, BodyForm, Representation},
    object::Object,
    registry::{Kind, Subresource, registry},
    render::json_value,
    status::ApiError,
    subresources,
    verbs::{ObjectState, WriteOutcome, WriteRequest, apply_json, parse_json},
};

impl ResourceRequest {
    pub(super) async fn subresource(
        &self,
        subresource: Subresource,
        name: &str,
        body: &mut Body,
    ) -> Result<Response, ApiError> {
        let request = self.write_request();
        match (subresource, self.parts.method.as_str()) {
            (Subresource::Scale, "GET") => {
                let kind = self.target.kind;
                let found = self.server.get(kind, &self.target.namespace, name, &self.query);
                let entry = found.map_err(|error| match error.has_reason("NotFound") {
                    true => subresources::scale_not_found(kind, name),
                    false => error,
                })?;
                let object = Object::from_entry(&entry).map_err(ApiError::internal)?;
                let scale = subresources::scale_of(kind, &object);
                let view = self.view()?;
                let shown = match view.representation {
                    Representation::Table => subresources::scale_table(&scale, view.now),
                    _ => scale,
                };
                Ok(json_value(StatusCode::OK, &shown))
            }
            (Subresource::Scale, "PUT") => {
                let scale = self.object_body(body).await?.value;
                let outcome = self.server.change_scale(&request, name, |_| Ok(scale.clone())).await?;
                scale_response(self.target.kind, outcome)
            }
            (Subresource::Scale, "PATCH")
                if negotiate::content_type(&self.parts.headers) == APPLY_CONTENT_TYPE =>
            {
                let scale = decode_applied(&self.bytes(body).await?)?;
                let outcome = self.server.apply_scale(&request, name, scale, self.query.force).await?;
                scale_response(self.target.kind, outcome)
            }
            (Subresource::Scale, "PATCH") => {
                let bytes = self.bytes(body).await?;
                let patch = decode(BodyForm::Json, &bytes)?.value;
                let json = negotiate::content_type(&self.parts.headers) == "application/json-patch+json";
                let outcome = self
                    .server
                    .change_scale(&request, name, |scale| patch_scale(scale, &patch, json))
                    .await?;
                scale_response(self.target.kind, outcome)
            }
            (Subresource::ScaleRejected, _) => {
                self.server.get(self.target.kind, &self.target.namespace, name, &self.query)?;
                Err(subresources::scale_managed_by_gateway(name))
            }
            (Subresource::Binding, "POST") => {
                let mut binding = self.object_body(body).await?.value;
                self.review_posted(&request, "binding", name, &mut binding).await?;
                self.server.bind(&request, name, &binding).await?;
                Ok(success(StatusCode::CREATED))
            }
            (Subresource::Token, "POST") => {
                let Value::Object(map) = self.object_body(body).await?.value else {
                    return Err(ApiError::bad_request("the body is not a JSON object"));
                };
                let asked = Value::Object(map);
                restrict_posted(&self.server, &request, "token", name, &asked)?;
                let Value::Object(map) = asked else { return Err(ApiError::no_resource()) };
                let namespace = &self.target.namespace;
                let token = self.server.create_token(namespace, name, Object(map), self.query.dry_run)?;
                Ok(json_value(StatusCode::CREATED, &Value::Object(token.0)))
            }
            (Subresource::Eviction, "POST") => {
                let mut eviction = self.object_body(body).await?.value;
                self.review_posted(&request, "eviction", name, &mut eviction).await?;
                self.server.evict(&request, name, &eviction).await?;
                Ok(success(StatusCode::CREATED))
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    /// `POST …/bindings`: the binding of the pod that the body names.
    pub(super) async fn bind_named(&self, binding: Object) -> Result<Response, ApiError> {
        let kind = registry().find("", "v1", "pods").ok_or_else(ApiError::no_resource)?;
        let request = WriteRequest { kind, ..self.write_request() };
        let name = binding.name().to_owned();
        let mut binding = Value::Object(binding.0);
        self.review_posted(&request, "binding", &name, &mut binding).await?;
        self.server.bind(&request, &name, &binding).await?;
        Ok(success(StatusCode::CREATED))
    }

    /// Lets admission decide about what is posted to a subresource.
    async fn review_posted(
        &self,
        request: &WriteRequest,
        subresource: &'static str,
        name: &str,
        body: &mut Value,
    ) -> Result<(), ApiError> {
        restrict_posted(&self.server, request, subresource, name, body)?;
        let attributes = AdmissionAttributes { request, operation: AdmissionOperation::Create, subresource };
        self.server.review_posted(&attributes, name, body).await.map(drop)
    }
}

fn success(code: StatusCode) -> Response {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code.as_u16()});
    json_value(code, &status)
}

fn scale_response(kind: &Kind, outcome: WriteOutcome) -> Result<Response, ApiError> {
    let object = match outcome.state {
        ObjectState::Stored(entry) => Object::from_entry(&entry).map_err(ApiError::internal)?,
        ObjectState::Dry(object) | ObjectState::Deleted(object) => object,
    };
    Ok(json_value(StatusCode::OK, &subresources::scale_of(kind, &object)))
}

/// A scale has no lists: a strategic patch of it is a merge patch.
fn patch_scale(mut scale: Value, patch: &Value, json: bool) -> Result<Value, ApiError> {
    if json {
        apply_json(&mut scale, &parse_json(patch)?)?;
    } else {
        json_patch::merge(&mut scale, patch);
    }
    Ok(scale)
}
