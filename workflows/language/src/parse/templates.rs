//! Templates and the fields of a state's data flow.

use crate::definition::{DataFlow, PathField, QueryLanguage, ResultPath};
use crate::path::{Path, ReferencePath, Root};
use crate::template::Template;
use crate::validate::{DiagnosticCode, ProblemReport};
use crate::value::{Map, Value};

use super::expressions;
use super::fields::{Fields, NOT_A_PATH, NOT_IN_THE_INPUT, not_a_reference};

impl Fields<'_> {
    /// The field as a template in the state's language.
    pub(super) fn template(&self, name: &str, report: &mut ProblemReport) -> Option<Template> {
        template(self, name, self.get(name)?, report)
    }

    /// The same, but the template must be an object.
    pub(super) fn object_template(&self, name: &str, report: &mut ProblemReport) -> Option<Template> {
        let value = self.get(name)?;
        let whole_expression = self.jsonata() && value.is_string();
        if !value.is_object() && !whole_expression {
            report.schema(&self.place(name), "Expected value of type Object");
            return None;
        }
        self.template(name, report)
    }

    /// `Assign`: an object whose keys are names of variables.
    pub(super) fn assign(&self, report: &mut ProblemReport) -> Option<Template> {
        let value = self.get("Assign")?;
        let Some(map) = value.as_object() else {
            report.schema(&self.place("Assign"), "Expected value of type Object");
            return None;
        };
        for key in map.keys() {
            let name = if self.jsonata() { key } else { key.strip_suffix(".$").unwrap_or(key) };
            if let Err((code, message)) = variable_name(name, self.jsonata()) {
                report.error(code, &self.place("Assign"), message);
            }
        }
        self.template("Assign", report)
    }

    /// The stages of the data flow, `Parameters` included.
    pub(super) fn data_flow(&self, report: &mut ProblemReport) -> DataFlow {
        if self.jsonata() {
            return DataFlow::Jsonata {
                arguments: self.template("Arguments", report),
                output: self.template("Output", report),
            };
        }
        DataFlow::JsonPath {
            input_path: self.path_field("InputPath", report),
            parameters: self.template("Parameters", report),
            result_selector: self.object_template("ResultSelector", report),
            result_path: self.result_path(report),
            output_path: self.path_field("OutputPath", report),
        }
    }

    /// `InputPath` or `OutputPath`.
    fn path_field(&self, name: &str, report: &mut ProblemReport) -> PathField {
        match self.get(name) {
            None => PathField::Whole,
            Some(Value::Null) => PathField::Nothing,
            Some(Value::String(text)) => match Path::parse(text) {
                Ok(path) if path.is_root() && *path.root() == Root::Input => PathField::Whole,
                Ok(path) => PathField::Path(path),
                Err(_) => {
                    report.schema(&self.place(name), NOT_A_PATH);
                    PathField::Whole
                }
            },
            Some(_) => {
                report.schema(&self.place(name), "Expected value of type String");
                PathField::Whole
            }
        }
    }

    /// `ResultPath`: null, or a path in the input; not in the context object or a variable.
    pub(super) fn result_path(&self, report: &mut ProblemReport) -> ResultPath {
        match self.get("ResultPath") {
            None => ResultPath::Whole,
            Some(Value::Null) => ResultPath::Discard,
            Some(Value::String(text)) => match ReferencePath::parse(text) {
                Ok(path) if *path.as_path().root() != Root::Input => {
                    report.schema(&self.place("ResultPath"), NOT_IN_THE_INPUT);
                    ResultPath::Whole
                }
                Ok(path) if path.is_root() => ResultPath::Whole,
                Ok(path) => ResultPath::Path(path),
                Err(problem) => {
                    report.schema(&self.place("ResultPath"), not_a_reference(text, &problem.message));
                    ResultPath::Whole
                }
            },
            Some(_) => {
                report.schema(&self.place("ResultPath"), "Expected value of type String");
                ResultPath::Whole
            }
        }
    }
}

/// Compiles `value` as the template of the field `name`.
pub(super) fn template(
    fields: &Fields<'_>,
    name: &str,
    value: &Value,
    report: &mut ProblemReport,
) -> Option<Template> {
    let at = fields.place(name);
    let sound = match fields.language {
        QueryLanguage::Jsonata => marks(value, &at, report),
        QueryLanguage::JsonPath => distinct(value, &at, report),
    };
    if !sound {
        return None;
    }
    match Template::compile_for(value, fields.language, fields.available(name)) {
        Ok(template) => Some(template),
        Err(problems) => {
            for problem in problems {
                // A key without a path is reported at its object.
                let place = match problem.location.rsplit_once('/') {
                    Some((above, key)) if key.ends_with(".$") => above,
                    _ => &problem.location,
                };
                let place = format!("{at}{place}");
                report.problem(&place, problem);
            }
            None
        }
    }
}

/// Whether all strings of a JSONata template have correct delimiters.
fn marks(value: &Value, at: &str, report: &mut ProblemReport) -> bool {
    match value {
        Value::String(text) => match expressions::whole(text) {
            Ok(_) => true,
            Err(message) => {
                report.schema(at, message);
                false
            }
        },
        _ => below(value, at, &mut |value, at| marks(value, at, report)),
    }
}

/// Whether no object of a JSONPath template has both `key` and `key.$`.
fn distinct(value: &Value, at: &str, report: &mut ProblemReport) -> bool {
    let mut sound = true;
    for key in value.as_object().into_iter().flat_map(Map::keys) {
        if let Some(name) = key.strip_suffix(".$")
            && value.get(name).is_some()
        {
            report.schema(at, format!("The fields '{name}' and '{key}' cannot both be specified"));
            sound = false;
        }
    }
    below(value, at, &mut |value, at| distinct(value, at, report)) && sound
}

/// Calls `sound` with each direct child of `value`; returns whether all are valid.
fn below(value: &Value, at: &str, sound: &mut dyn FnMut(&Value, &str) -> bool) -> bool {
    let mut all = true;
    match value {
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                all &= sound(item, &format!("{at}[{index}]"));
            }
        }
        Value::Object(map) => {
            for (key, item) in map.iter() {
                all &= sound(item, &format!("{at}/{key}"));
            }
        }
        _ => {}
    }
    all
}

/// The maximum length of a variable's name, in characters.
const VARIABLE_NAME_CHARS_MAX: usize = 80;

/// A letter followed by letters, digits and underscores of any script; JSONata states also allow hyphens, although such
/// a name can only be the key of an object. `states` is reserved.
fn variable_name(name: &str, hyphens: bool) -> Result<(), (DiagnosticCode, String)> {
    if name == "states" {
        return Err((
            DiagnosticCode::ReservedVariableName,
            "Cannot assign to reserved variable '$states'.".to_string(),
        ));
    }
    let invalid = |why: &str| {
        Err((DiagnosticCode::InvalidVariableName, format!("Invalid variable name '{name}': {why}")))
    };
    let mut letters = name.chars();
    let follows = |letter: char| letter.is_alphanumeric() || letter == '_' || (hyphens && letter == '-');
    if !letters.next().is_some_and(char::is_alphabetic) || !letters.all(follows) {
        return invalid("the variable name contains invalid characters.");
    }
    match name.chars().count() > VARIABLE_NAME_CHARS_MAX {
        true => invalid(&format!("the variable name is longer than {VARIABLE_NAME_CHARS_MAX} characters.")),
        false => Ok(()),
    }
}
