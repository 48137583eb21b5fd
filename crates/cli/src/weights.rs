//! Whether a model folder has weights, for the commands that have no configuration and so no `model.init`.

use crate::exit::BadInput;
use std::path::Path;

/// Files of weights by their endings, with those that other errors have a remedy for: pickled ones, and a checkpoint of several ranks.
const WEIGHTS: [&str; 5] = [".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", "tensors.json"];

/// Refuses a model folder without any weights.
pub fn must_be_in(folder: &Path) -> Result<(), BadInput> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.file_name().to_string_lossy().into_owned());
    if names.into_iter().any(|name| WEIGHTS.iter().any(|end| name.ends_with(end))) {
        return Ok(());
    }
    let what = "no model.safetensors and no model.safetensors.index.json in this folder";
    Err(BadInput(format!("{}: {what}. Download the weights into it, or name a folder that has them", folder.display())))
}
