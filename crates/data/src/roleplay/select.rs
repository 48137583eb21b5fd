//! Joins the dialogues of one language with seeds and evaluations and applies the rules, in the order of [`Removed`].

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use super::dialogue::{self, Turn};
use super::report::RoleplayReport;
use super::tables::{self, Evaluations, Key, Language, Scores, Seed};
use super::{Removed, RoleplayOptions, card};
use crate::Error;

/// Rounding allowance of a weighted mean, so that a score of exactly the threshold passes.
const SCORE_EPS: f64 = 1e-9;

/// The counter of a rule.
type Rule = fn(&mut Removed) -> &mut u64;

/// A dialogue that passed every rule.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    pub language: Language,
    pub key: Key,
    /// Whom the model plays.
    pub character: String,
    pub overall: f64,
    pub system: String,
    pub turns: Vec<Turn>,
}

impl Sample {
    /// `language/seed/model/run`.
    pub fn id(&self) -> String {
        format!("{}/{}/{}/{}", self.language.name(), self.key.seed, self.key.model, self.key.run)
    }
}

/// The rules of one language.
pub(super) struct Select<'a> {
    language: Language,
    options: &'a RoleplayOptions,
    seeds: HashMap<String, Seed>,
    evaluations: Evaluations,
}

impl<'a> Select<'a> {
    pub fn new(language: Language, options: &'a RoleplayOptions, seeds: HashMap<String, Seed>, evaluations: Evaluations) -> Self {
        Self { language, options, seeds, evaluations }
    }

    /// Reads the dialogues and keeps those that pass.
    pub fn run(&self, folder: &Path, report: &mut RoleplayReport) -> Result<Vec<Sample>, Error> {
        let (mut met, mut samples) = (HashSet::new(), Vec::new());
        let (mut removed, mut tidied) = (Removed::default(), super::Tidied::default());
        tables::dialogues(self.language, folder, report, &mut |key, dialogue| {
            if !met.insert(key.clone()) {
                removed.duplicate += 1;
                return Ok(false);
            }
            let (seed, scores) = match self.judge(&key) {
                Ok(found) => found,
                Err(rule) => {
                    *rule(&mut removed) += 1;
                    return Ok(true);
                }
            };
            let mut turns = dialogue::parse(dialogue)?;
            dialogue::tidy(&mut turns, self.options.max_turns, &mut tidied);
            if turns.is_empty() {
                removed.empty += 1;
                return Ok(true);
            }
            samples.push(Sample {
                language: self.language,
                key,
                character: seed.ai_name.clone(),
                overall: scores.overall(),
                system: card::system(self.language, seed),
                turns,
            });
            Ok(true)
        })?;
        removed.bad_row = report.tables.last().map_or(0, |table| table.bad_rows);
        report.models.extend(met.iter().map(|key| key.model.clone()));
        report.unmatched_evaluations += self.evaluations.keys().filter(|key| !met.contains(*key)).count() as u64;
        let samples = self.cap(samples, &mut removed);
        report.removed.add(&removed);
        report.tidied.add(&tidied);
        Ok(samples)
    }

    /// The seed and scores of a dialogue that passes the rules on its key, or the rule that removes it.
    fn judge(&self, key: &Key) -> Result<(&Seed, Scores), Rule> {
        let options = self.options;
        let seed = self.seeds.get(&key.seed).ok_or((|r| &mut r.missing_seed) as Rule)?;
        let Some(evaluation) = self.evaluations.get(key) else { return Err(|r| &mut r.no_evaluation) };
        let Some(scores) = *evaluation else { return Err(|r| &mut r.incomplete_scores) };
        let excluded = options.exclude_models.contains(&key.model);
        if excluded || !(options.include_models.is_empty() || options.include_models.contains(&key.model)) {
            return Err(|r| &mut r.model);
        }
        if scores.overall() + SCORE_EPS < options.min_overall {
            return Err(|r| &mut r.overall);
        }
        if scores.basics + SCORE_EPS < options.min_basics {
            return Err(|r| &mut r.basics);
        }
        if scores.logic + SCORE_EPS < options.min_logic {
            return Err(|r| &mut r.logic);
        }
        Ok((seed, scores))
    }

    /// Keeps the best dialogues of each seed, up to the cap; equal scores by model and run.
    fn cap(&self, samples: Vec<Sample>, removed: &mut Removed) -> Vec<Sample> {
        let Some(most) = self.options.max_per_seed else { return samples };
        let mut seeds: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
        for sample in samples {
            seeds.entry(sample.key.seed.clone()).or_default().push(sample);
        }
        let mut kept = Vec::new();
        for mut samples in seeds.into_values() {
            samples.sort_by(|a, b| b.overall.partial_cmp(&a.overall).unwrap_or(Ordering::Equal).then_with(|| a.key.cmp(&b.key)));
            removed.seed_cap += samples.len().saturating_sub(most) as u64;
            samples.truncate(most);
            kept.append(&mut samples);
        }
        kept
    }
}
