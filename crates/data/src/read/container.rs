//! What a file is, from its name and its first bytes: layout, compression, encoding.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use crate::Error;

/// How rows lie in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One JSON object a line.
    Lines,
    /// One JSON array of objects.
    Array,
    /// Columns.
    Parquet,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Bytes of text ready to be split, byte-order mark removed.
pub(crate) struct Text {
    pub reader: Box<dyn BufRead + Send>,
    /// Bytes removed from the front (the byte-order mark), so that offsets stay true.
    pub skipped: u64,
}

const EXTENSIONS: &str = ".jsonl, .ndjson, .json (each also with .gz or .zst), .parquet";
/// Enough to recognise every signature below, and the head of a pointer file.
const HEAD: usize = 256;
const BLOCK: usize = 256 << 10;

/// The layout that the file's name promises.
pub(crate) fn layout(path: &Path) -> Result<Layout, Error> {
    named(path).map(|(layout, _)| layout)
}

fn named(path: &Path) -> Result<(Layout, Compression), Error> {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let (stem, compression) = match (name.strip_suffix(".gz"), name.strip_suffix(".zst")) {
        (Some(stem), _) => (stem, Compression::Gzip),
        (_, Some(stem)) => (stem, Compression::Zstd),
        _ => (name.as_str(), Compression::None),
    };
    let layout = match stem.rsplit_once('.').map(|(_, extension)| extension) {
        Some("jsonl" | "ndjson") => Layout::Lines,
        Some("json") => Layout::Array,
        Some("parquet") if compression == Compression::None => Layout::Parquet,
        Some("parquet") => {
            return Err(Error::file(path, "a Parquet file inside another compression", "unpack it; Parquet compresses by itself"));
        }
        _ => return Err(Error::file(path, "the name does not say what the file is", format!("name it with one of {EXTENSIONS}"))),
    };
    Ok((layout, compression))
}

/// Opens a file; folders are refused by name.
pub(crate) fn open_file(path: &Path) -> Result<File, Error> {
    let file = File::open(path).map_err(|source| Error::io(path, "cannot open the data file", source))?;
    let metadata = file.metadata().map_err(|source| Error::io(path, "cannot read the data file's size", source))?;
    if metadata.is_dir() {
        return Err(Error::file(path, "is a folder", format!("name the files in it ({EXTENSIONS})")));
    }
    Ok(file)
}

/// Opens a text file, unpacking it as its name says, and refuses what is not UTF-8 text.
pub(crate) fn open_text(path: &Path) -> Result<Text, Error> {
    let (_, compression) = named(path)?;
    let file = BufReader::with_capacity(BLOCK, open_file(path)?);
    let fault = |source| read_fault(path, source);
    let mut bytes: Box<dyn Read + Send> = match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(MultiGzDecoder::new(file)),
        Compression::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(file).map_err(fault)?),
    };
    let mut head = Vec::with_capacity(HEAD);
    (&mut bytes).take(HEAD as u64).read_to_end(&mut head).map_err(fault)?;
    refuse_signatures(path, &head)?;
    let skipped = if head.starts_with(b"\xEF\xBB\xBF") { 3 } else { 0 };
    let mut head = Cursor::new(head);
    head.set_position(skipped);
    Ok(Text { reader: Box::new(BufReader::with_capacity(BLOCK, head.chain(bytes))), skipped })
}

/// A read that failed: damaged compression is told apart from the disk's faults.
pub(crate) fn read_fault(path: &Path, source: io::Error) -> Error {
    let packed = match named(path) {
        Ok((_, Compression::Gzip)) => "gzip",
        Ok((_, Compression::Zstd)) => "zstd",
        _ => return Error::io(path, "cannot read the data file", source),
    };
    if source.raw_os_error().is_some() {
        return Error::io(path, "cannot read the data file", source);
    }
    Error::file(
        path,
        format!("the {packed} data is damaged, cut or not {packed} at all ({source})"),
        format!("test it with `{packed} -t` and fetch or pack it again"),
    )
}

/// Refuses files whose first bytes show that they are something else than UTF-8 JSON.
fn refuse_signatures(path: &Path, head: &[u8]) -> Result<(), Error> {
    let utf16 = "convert it: iconv -f UTF-16 -t UTF-8";
    let (found, remedy) = match head {
        [0xFF, 0xFE, 0, 0, ..] | [0, 0, 0xFE, 0xFF, ..] => ("UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
        [0xFF, 0xFE, ..] => ("UTF-16 text (little endian)", utf16),
        [0xFE, 0xFF, ..] => ("UTF-16 text (big endian)", utf16),
        [b'{' | b'[' | b'\n' | b' ', 0, ..] | [0, b'{' | b'[' | b'\n' | b' ', ..] => ("UTF-16 text without a byte-order mark", utf16),
        [0x1F, 0x8B, ..] => ("gzip data", "add .gz to its name"),
        [0x28, 0xB5, 0x2F, 0xFD, ..] => ("zstd data", "add .zst to its name"),
        [b'P', b'A', b'R', b'1', ..] => ("a Parquet file", "name it .parquet"),
        [b'P', b'K', 3, 4, ..] => ("a zip archive", "unpack it"),
        _ if head.starts_with(b"version https://git-lfs") => ("a Git LFS pointer, not the data", "run `git lfs pull` in that repository"),
        _ if head.trim_ascii_start().starts_with(b"<") => ("HTML or XML, not JSON", "fetch the raw file, not the page that shows it"),
        _ => return Ok(()),
    };
    Err(Error::file(path, found, remedy))
}
