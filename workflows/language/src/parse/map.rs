//! Map states, inline and distributed.

use std::sync::Arc;

use crate::definition::{
    Batcher, FlowId, ItemReader, Items, MapMode, MapState, Quantity, Resource, ResultWriter, StateMachineType,
};
use crate::path::Path;
use crate::validate::DiagnosticCode;
use crate::value::Value;

use super::allowed;
use super::fields::{Fields, neither};
use super::flow::{Compiler, FlowContext, StateCursor};

/// The valid resources of an `ItemReader`.
const READERS: &[&str] = &[":states:::s3:getObject", ":states:::s3:listObjectsV2"];
/// The maximum length of a label, in characters.
const LABEL_CHARS_MAX: usize = 40;
/// Fields that only a distributed Map supports.
const DISTRIBUTED_ONLY: &[&str] = &["ItemReader", "ItemBatcher", "ResultWriter", "Label"];

impl Compiler {
    pub(super) fn map(&mut self, fields: &Fields<'_>, here: StateCursor) -> Option<MapState> {
        let name = fields.one_of(&["ItemProcessor", "Iterator"], &mut self.report);
        let mode = match name {
            Some(name) => self.mode(fields, name),
            None => MapMode::Inline,
        };
        if mode == MapMode::Inline {
            for field in DISTRIBUTED_ONLY.iter().filter(|field| fields.has(field)) {
                let message = format!("Field '{field}' is only supported for Map states in DISTRIBUTED mode");
                self.report.schema(&fields.at, message);
            }
        }
        let items = self.items(fields);
        let item_reader = self.item_reader(fields);
        let item_selector = self.item_selector(fields);
        let item_batcher = self.item_batcher(fields);
        let result_writer = self.result_writer(fields);
        let report = &mut self.report;
        let max_concurrency =
            fields.quantity("MaxConcurrency", 0, u64::MAX, report).unwrap_or(Quantity::Value(0));
        let tolerated_failure_count = fields.quantity("ToleratedFailureCount", 0, u64::MAX, report);
        let tolerated_failure_percentage = fields.fraction("ToleratedFailurePercentage", 0.0, 100.0, report);
        let label = self.label(fields);
        let processor = self.processor(fields, name?, mode, here)?;
        Some(MapState {
            processor,
            mode,
            items: items?,
            item_reader,
            item_selector,
            item_batcher,
            result_writer,
            max_concurrency,
            tolerated_failure_count,
            tolerated_failure_percentage,
            label,
            legacy: name == Some("Iterator"),
        })
    }

    fn mode(&mut self, fields: &Fields<'_>, name: &str) -> MapMode {
        let place = format!("{}/ProcessorConfig", fields.place(name));
        let Some(config) = fields.get(name).and_then(|processor| processor.get("ProcessorConfig")) else {
            // Without a mode, a field that only a distributed Map supports makes it one.
            return match DISTRIBUTED_ONLY.iter().any(|field| fields.has(field)) {
                true => MapMode::Distributed(StateMachineType::Standard),
                false => MapMode::Inline,
            };
        };
        let Some(config) = Fields::of(config, &place, fields.language, &mut self.report) else {
            return MapMode::Inline;
        };
        config.only(allowed::PROCESSOR_CONFIG, &mut self.report);
        let mode = config.word("Mode", &["INLINE", "DISTRIBUTED"], &mut self.report);
        let execution = config.word("ExecutionType", &["STANDARD", "EXPRESS"], &mut self.report);
        match (mode, execution) {
            (Some("DISTRIBUTED"), Some("EXPRESS")) => MapMode::Distributed(StateMachineType::Express),
            (Some("DISTRIBUTED"), Some(_)) => MapMode::Distributed(StateMachineType::Standard),
            (Some("DISTRIBUTED"), None) => {
                config.required("ExecutionType", &mut self.report);
                MapMode::Distributed(StateMachineType::Standard)
            }
            (_, Some(_)) => {
                self.report.schema(&config.at, "Field 'ExecutionType' is not supported");
                MapMode::Inline
            }
            _ => MapMode::Inline,
        }
    }

    fn processor(
        &mut self,
        fields: &Fields<'_>,
        name: &str,
        mode: MapMode,
        here: StateCursor,
    ) -> Option<FlowId> {
        let at = fields.place(name);
        if self.express && matches!(mode, MapMode::Distributed(_)) {
            let message =
                "The field 'Mode' with value 'DISTRIBUTED' is not supported inside 'EXPRESS' state machines";
            self.report.schema(&format!("{at}/ProcessorConfig/Mode"), message);
        }
        let outside = (self.express, self.distributed);
        self.express |= mode == MapMode::Distributed(StateMachineType::Express);
        self.distributed |= mode != MapMode::Inline;
        let place = FlowContext { at, parent: Some(here.state), more: &["ProcessorConfig"] };
        let flow = self.flow(fields.get(name)?, place);
        (self.express, self.distributed) = outside;
        flow
    }

    fn items(&mut self, fields: &Fields<'_>) -> Option<Items> {
        let report = &mut self.report;
        if !fields.jsonata() {
            return match fields.has("ItemsPath") {
                false => Some(Items::Whole),
                true => {
                    let text = fields.string("ItemsPath", report)?;
                    fields.reference_path("ItemsPath", report)?;
                    Path::parse(&text).ok().map(Items::Path)
                }
            };
        }
        match fields.get("Items") {
            None => Some(Items::Whole),
            Some(Value::Array(_) | Value::Object(_)) => fields.template("Items", report).map(Items::Template),
            Some(Value::String(_)) => {
                fields.expression("Items", report)?;
                fields.template("Items", report).map(Items::Template)
            }
            Some(_) => {
                report.schema(&fields.place("Items"), "Expected value of type Array");
                None
            }
        }
    }

    fn item_selector(&mut self, fields: &Fields<'_>) -> Option<crate::template::Template> {
        if fields.jsonata() {
            return fields.template("ItemSelector", &mut self.report);
        }
        if fields.has("ItemSelector") && fields.has("Parameters") {
            self.conflict(fields, &["ItemSelector", "Parameters"]);
        }
        match fields.has("ItemSelector") {
            true => fields.object_template("ItemSelector", &mut self.report),
            // Its problems have already been reported with the data flow.
            false => fields.template("Parameters", &mut crate::validate::ProblemReport::default()),
        }
    }

    /// The call of a reader or writer: `Resource` and its `Parameters` or `Arguments`.
    fn call(&mut self, fields: &Fields<'_>) -> (Option<Arc<str>>, Option<crate::template::Template>) {
        let resource = fields.string("Resource", &mut self.report);
        if let Some(arn) = &resource
            && !matches!(Resource::parse(arn), Ok(Resource::Integration { .. } | Resource::Foreign(_)))
        {
            let message = super::task::unknown_resource(arn);
            self.report.schema(&fields.place("Resource"), message);
        }
        let name = if fields.jsonata() { "Arguments" } else { "Parameters" };
        (resource, fields.object_template(name, &mut self.report))
    }

    fn item_reader(&mut self, fields: &Fields<'_>) -> Option<ItemReader> {
        let reader = fields.object("ItemReader", &mut self.report)?;
        reader.only(allowed::ITEM_READER, &mut self.report);
        reader.required("Resource", &mut self.report);
        let (resource, arguments) = self.call(&reader);
        if resource.as_ref().is_some_and(|arn| !READERS.iter().any(|reader| arn.ends_with(reader))) {
            let message = "The field 'Resource' does not match any of the allowed values";
            self.report.schema(&reader.place("Resource"), message);
        }
        let mut made = ItemReader {
            resource: resource?,
            arguments,
            input_type: None,
            transformation: None,
            manifest_type: None,
            csv_header_location: None,
            csv_headers: Vec::new(),
            csv_delimiter: None,
            items_pointer: None,
            max_items: None,
        };
        if let Some(config) = reader.object("ReaderConfig", &mut self.report) {
            self.reader_config(&config, &mut made);
        }
        Some(made)
    }

    fn reader_config(&mut self, config: &Fields<'_>, reader: &mut ItemReader) {
        config.only(allowed::READER_CONFIG, &mut self.report);
        let report = &mut self.report;
        let mut word = |name: &str, words: &[&'static str]| config.word(name, words, report).map(Arc::from);
        reader.input_type = word("InputType", &["CSV", "JSON", "JSONL", "MANIFEST", "PARQUET"]);
        reader.transformation = word("Transformation", &["NONE", "LOAD_AND_FLATTEN"]);
        reader.manifest_type = word("ManifestType", &["ATHENA_DATA", "S3_INVENTORY"]);
        reader.csv_header_location = word("CSVHeaderLocation", &["FIRST_ROW", "GIVEN"]);
        reader.csv_delimiter = word("CSVDelimiter", &["COMMA", "PIPE", "SEMICOLON", "SPACE", "TAB"]);
        reader.items_pointer = config.string("ItemsPointer", report);
        reader.max_items = config.quantity("MaxItems", 0, 100_000_000, report);
        for (position, header) in config.array("CSVHeaders", report).unwrap_or_default().iter().enumerate() {
            match header {
                Value::String(header) => reader.csv_headers.push(header.clone()),
                _ => {
                    let at = format!("{}[{position}]", config.place("CSVHeaders"));
                    report.schema(&at, "Expected value of type String");
                }
            }
        }
        if reader.csv_header_location.as_deref() == Some("GIVEN") {
            config.required("CSVHeaders", report);
        }
    }

    fn item_batcher(&mut self, fields: &Fields<'_>) -> Option<Batcher> {
        let batcher = fields.object("ItemBatcher", &mut self.report)?;
        batcher.only(allowed::ITEM_BATCHER, &mut self.report);
        let mut sizes = allowed::ITEM_BATCHER[1..].iter();
        if !sizes.any(|(name, _)| batcher.has(name)) {
            let names = ["MaxItemsPerBatch", "MaxInputBytesPerBatch"];
            self.report.schema(&batcher.at, neither(&names));
        }
        let report = &mut self.report;
        Some(Batcher {
            batch_input: batcher.object_template("BatchInput", report),
            max_items_per_batch: batcher.quantity("MaxItemsPerBatch", 0, u64::MAX, report),
            max_input_bytes_per_batch: batcher.quantity("MaxInputBytesPerBatch", 0, 262_144, report),
        })
    }

    fn result_writer(&mut self, fields: &Fields<'_>) -> Option<ResultWriter> {
        let writer = fields.object("ResultWriter", &mut self.report)?;
        writer.only(allowed::RESULT_WRITER, &mut self.report);
        if !writer.has("WriterConfig") {
            writer.required("Resource", &mut self.report);
        }
        let (resource, arguments) = self.call(&writer);
        let config = writer.object("WriterConfig", &mut self.report);
        let (mut output_type, mut transformation) = (None, None);
        if let Some(config) = config {
            config.only(allowed::WRITER_CONFIG, &mut self.report);
            let report = &mut self.report;
            output_type = config.word("OutputType", &["JSON", "JSONL"], report).map(Arc::from);
            transformation =
                config.word("Transformation", &["NONE", "COMPACT", "FLATTEN"], report).map(Arc::from);
        }
        Some(ResultWriter { resource, arguments, output_type, transformation })
    }

    fn label(&mut self, fields: &Fields<'_>) -> Option<Arc<str>> {
        let label = fields.string("Label", &mut self.report)?;
        let at = fields.place("Label");
        let mut refuse = |message: String| self.report.error(DiagnosticCode::InvalidLabelName, &at, message);
        if label.is_empty() {
            refuse("Label cannot be empty".to_string());
        } else if label.chars().count() > LABEL_CHARS_MAX {
            refuse(format!("Label cannot exceed {LABEL_CHARS_MAX} characters"));
        } else if let Some(letter) = label.chars().find(|letter| !label_letter(*letter)) {
            let shown = super::python_repr(letter.encode_utf8(&mut [0; 4]));
            refuse(format!("Label contains invalid character: {shown}"));
        } else if !self.labels.insert(label.clone()) {
            self.report.error(
                DiagnosticCode::DuplicateLabelName,
                &at,
                format!("Duplicate Label name: {label}"),
            );
        }
        Some(label)
    }
}

/// A valid character of labels, which become part of ARNs.
fn label_letter(letter: char) -> bool {
    let special = "?*<>{}[]:;,\\|^~$#%&`\"".contains(letter)
        || matches!(letter, '\u{fffe}' | '\u{ffff}' | '\u{10_ffff}');
    !special && !letter.is_whitespace() && !letter.is_control()
}
