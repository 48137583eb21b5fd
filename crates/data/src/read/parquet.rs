//! Parquet rows as JSON objects, row group by row group, only the columns that are wanted.
//!
//! Parquet unifies the members of all structs in a column, so a key that a row never had comes out as null and
//! cannot be told from a null that the row did have. Null members of structs are therefore left out: no null is ever
//! invented. Nulls that stand in lists or maps are kept. What is left out inside the `arguments` of tool calls is
//! counted, since there a null may have been meant; `arguments` stored as JSON text are exact.
//!
//! Memory: one page of each wanted column (2 GiB at most by the format) and the batch being read.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use parquet::record::reader::{ReaderIter, RowIter, TreeBuilder};
use parquet::record::{Field, Row};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type, TypePtr};
use serde_json::{Map, Number, Value};

use super::container::open_file;
use super::raw::RawRow;
use crate::Error;

const DAMAGED: &str = "the file is damaged or cut; fetch or write it again";
/// Values in one page above which a page is refused: writers put some thousands into one.
const MAX_PAGE_VALUES: u32 = 1 << 26;
/// Rows decoded at a time.
const DECODE_BATCH: usize = 256;

/// The rows of a Parquet file.
pub(crate) struct ParquetRows {
    path: PathBuf,
    file: SerializedFileReader<std::fs::File>,
    schema: SchemaDescPtr,
    groups: VecDeque<usize>,
    rows: Option<ReaderIter>,
    row: u64,
}

impl ParquetRows {
    /// Opens a file, reading only those of the `wanted` columns that it has.
    pub fn open(path: &Path, wanted: &[&str]) -> Result<Self, Error> {
        let file = open_file(path)?;
        let length = file.metadata().map_err(|source| Error::io(path, "cannot read the data file's size", source))?.len();
        let file = guarded(path, || SerializedFileReader::new(file).map_err(|e| e.to_string()))?;
        let schema = guarded(path, || {
            check_extents(&file, length)?;
            project(file.metadata().file_metadata().schema_descr(), wanted)
        })?;
        let Some(schema) = schema else {
            let columns: Vec<&str> = columns(&file).iter().map(|field| field.name()).collect();
            return Err(Error::file(
                path,
                format!("none of its columns is known (found: {})", columns.join(", ")),
                format!("name them as one of the row formats does ({})", wanted.join(", ")),
            ));
        };
        let groups = (0..file.metadata().num_row_groups()).collect();
        Ok(Self { path: path.to_path_buf(), file, schema, groups, rows: None, row: 0 })
    }

    /// The next row.
    pub fn next(&mut self) -> Result<Option<RawRow>, Error> {
        loop {
            let Self { path, file, schema, groups, rows, row } = self;
            if rows.is_none() {
                let Some(group) = groups.pop_front() else { return Ok(None) };
                *rows = Some(guarded(path, || {
                    let group = Guarded(file.get_row_group(group).map_err(|e| e.to_string())?);
                    TreeBuilder::new().with_batch_size(DECODE_BATCH).as_iter(schema.clone(), &group).map_err(|e| e.to_string())
                })?);
            }
            let next = guarded(path, || match rows.as_mut().and_then(Iterator::next) {
                None => Ok(None),
                Some(Ok(columns)) => Ok(Some(columns)),
                Some(Err(error)) => Err(format!("row {}: {error}", *row + 1)),
            })?;
            match next {
                None => self.rows = None,
                Some(columns) => {
                    self.row += 1;
                    return Ok(Some(RawRow::Columns { row: self.row, columns }));
                }
            }
        }
    }
}

/// Calls into the parquet crate: on damaged files it panics in places, which is the same fault to the user.
fn guarded<T>(path: &Path, call: impl FnOnce() -> Result<T, String>) -> Result<T, Error> {
    let found = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(found)) => found,
        Err(panic) => {
            let message = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            message.unwrap_or("a structure that the reader does not know").to_owned()
        }
    };
    Err(Error::file(path, format!("not readable as Parquet: {}", found.trim_end_matches('.')), DAMAGED))
}

fn columns(file: &SerializedFileReader<std::fs::File>) -> &[TypePtr] {
    file.metadata().file_metadata().schema_descr().root_schema().get_fields()
}

/// Every column chunk must lie inside the file: the reader allocates what the footer claims.
fn check_extents(file: &SerializedFileReader<std::fs::File>, length: u64) -> Result<(), String> {
    for group in file.metadata().row_groups() {
        if group.num_rows() < 0 {
            return Err(format!("a row group claims {} rows", group.num_rows()));
        }
        for column in group.columns() {
            let (start, size) = column.byte_range();
            if start.checked_add(size).is_none_or(|end| end > length) {
                return Err(format!("column {} claims bytes behind the end of the file", column.column_path()));
            }
        }
    }
    Ok(())
}

/// The schema of the wanted columns alone; none where the file has none of them.
fn project(schema: &SchemaDescriptor, wanted: &[&str]) -> Result<Option<SchemaDescPtr>, String> {
    let fields: Vec<TypePtr> = schema.root_schema().get_fields().iter().filter(|field| wanted.contains(&field.name())).cloned().collect();
    if fields.is_empty() {
        return Ok(None);
    }
    let root = Type::group_type_builder(schema.root_schema().name()).with_fields(fields).build().map_err(|e| e.to_string())?;
    Ok(Some(Arc::new(SchemaDescriptor::new(Arc::new(root)))))
}

/// A row group whose pages are checked before the decoder allocates for them.
struct Guarded<'a>(Box<dyn RowGroupReader + 'a>);

impl RowGroupReader for Guarded<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.0.metadata()
    }

    fn num_columns(&self) -> usize {
        self.0.num_columns()
    }

    fn get_column_page_reader(&self, i: usize) -> ParquetResult<Box<dyn PageReader>> {
        Ok(Box::new(GuardedPages(self.0.get_column_page_reader(i)?)))
    }

    fn get_column_bloom_filter(&self, i: usize) -> Option<&parquet::bloom_filter::Sbbf> {
        self.0.get_column_bloom_filter(i)
    }

    fn get_row_iter(&self, projection: Option<Type>) -> ParquetResult<RowIter<'_>> {
        self.0.get_row_iter(projection)
    }
}

struct GuardedPages(Box<dyn PageReader>);

impl Iterator for GuardedPages {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for GuardedPages {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        let page = self.0.get_next_page()?;
        if let Some(page) = &page {
            // A dictionary is allocated whole; each of its values takes at least one byte.
            let most = if page.is_dictionary_page() { page.buffer().len().min(MAX_PAGE_VALUES as usize) } else { MAX_PAGE_VALUES as usize };
            if page.num_values() as usize > most {
                return Err(ParquetError::General(format!("a page of {} bytes claims {} values", page.buffer().len(), page.num_values())));
            }
        }
        Ok(page)
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        self.0.peek_next_page()
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        self.0.skip_next_page()
    }
}

/// Bytes that a row holds, about.
pub(crate) fn size(row: &Row) -> usize {
    row.get_column_iter().map(|(key, field)| key.len() + field_size(field)).sum()
}

fn field_size(field: &Field) -> usize {
    size_of::<Field>()
        + match field {
            Field::Str(text) => text.len(),
            Field::Bytes(bytes) => bytes.len(),
            Field::Group(row) => size(row),
            Field::ListInternal(list) => list.elements().iter().map(field_size).sum(),
            Field::MapInternal(map) => map.entries().iter().map(|(key, value)| field_size(key) + field_size(value)).sum(),
            _ => 0,
        }
}

/// A row as an object, with the number of null members left out inside tool-call arguments.
pub(crate) fn object_of(row: Row) -> Result<(Map<String, Value>, u64), String> {
    let mut dropped = 0;
    let fields = members(row, false, &mut dropped)?;
    Ok((fields, dropped))
}

fn members(row: Row, in_arguments: bool, dropped: &mut u64) -> Result<Map<String, Value>, String> {
    let mut map = Map::new();
    for (key, field) in row.into_columns() {
        if matches!(field, Field::Null) {
            *dropped += u64::from(in_arguments);
            continue;
        }
        let value = value_of(field, in_arguments || key == "arguments", dropped).map_err(|reason| format!("{key}: {reason}"))?;
        map.insert(key, value);
    }
    Ok(map)
}

fn value_of(field: Field, in_arguments: bool, dropped: &mut u64) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(v) => Value::Bool(v),
        Field::Byte(v) => v.into(),
        Field::Short(v) => v.into(),
        Field::Int(v) => v.into(),
        Field::Long(v) => v.into(),
        Field::UByte(v) => v.into(),
        Field::UShort(v) => v.into(),
        Field::UInt(v) => v.into(),
        Field::ULong(v) => v.into(),
        // Through its shortest decimal: 0.1 stored in 32 bits stays 0.1.
        Field::Float(v) => float(v.to_string().parse().unwrap_or(f64::from(v)))?,
        Field::Double(v) => float(v)?,
        Field::Str(v) => Value::String(v),
        Field::Bytes(v) => match std::str::from_utf8(v.data()) {
            Ok(text) => Value::String(text.to_owned()),
            Err(error) => return Err(format!("binary data, not UTF-8 text (byte {} of the value)", error.valid_up_to())),
        },
        Field::Group(row) => Value::Object(members(row, in_arguments, dropped)?),
        Field::ListInternal(list) => {
            let items = list.elements().iter().map(|item| value_of(item.clone(), in_arguments, dropped));
            Value::Array(items.collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let mut object = Map::new();
            for (key, item) in map.entries() {
                let Field::Str(key) = key else { return Err("a map whose keys are not text; store it as JSON text".to_owned()) };
                if object.insert(key.clone(), value_of(item.clone(), in_arguments, dropped)?).is_some() {
                    return Err(format!("the key `{key}` is given twice in one map"));
                }
            }
            Value::Object(object)
        }
        Field::Float16(_)
        | Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => return Err("a decimal, date or time; store it as text".to_owned()),
    })
}

fn float(value: f64) -> Result<Value, String> {
    Number::from_f64(value).map(Value::Number).ok_or_else(|| format!("{value} cannot be written as JSON; store null"))
}
