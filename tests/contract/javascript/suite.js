// The Batch API through the official JavaScript client, unpatched and without retries. Run by tests/contract/test_javascript.py.
import assert from "node:assert/strict";
import { createReadStream, mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";

import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const CHAT = "/v1/chat/completions";
const DAY = 24 * 3600;
const FILE_FIELDS = ["bytes", "created_at", "expires_at", "filename", "id", "object", "purpose", "status", "status_details"];
const UPLOAD_FIELDS = ["bytes", "created_at", "expires_at", "file", "filename", "id", "object", "purpose", "status"];
const BATCH_FIELDS = [
  "cancelled_at", "cancelling_at", "completed_at", "completion_window", "created_at", "endpoint", "error_file_id", "errors", "expired_at",
  "expires_at", "failed_at", "finalizing_at", "id", "in_progress_at", "input_file_id", "metadata", "model", "object", "output_file_id",
  "request_counts", "status", "usage",
];

function line(customId, content, model = "m") {
  const body = { model, messages: [{ role: "user", content }] };
  return JSON.stringify({ custom_id: customId, method: "POST", url: CHAT, body }) + "\n";
}

async function submit(content, options = {}) {
  const file = await client.files.create({ file: await toFile(Buffer.from(content), "input.jsonl"), purpose: "batch" });
  return client.batches.create({ input_file_id: file.id, endpoint: CHAT, completion_window: "24h", ...options });
}

async function waitFor(id, condition = (batch) => ["failed", "completed", "expired", "cancelled"].includes(batch.status)) {
  for (const deadline = Date.now() + 60_000; Date.now() < deadline; await pause(30)) {
    const batch = await client.batches.retrieve(id);
    if (condition(batch)) return batch;
  }
  assert.fail(`${id} did not get there`);
}

async function results(id) {
  const text = await (await client.files.content(id)).text();
  return text.trimEnd().split("\n").map((one) => JSON.parse(one));
}

test("a file lives from its upload to its deletion", async () => {
  const path = join(mkdtempSync(join(tmpdir(), "contract-")), "input.jsonl");
  writeFileSync(path, line("c1", "one"));
  const file = await client.files.create({
    file: createReadStream(path), purpose: "batch", expires_after: { anchor: "created_at", seconds: DAY },
  });
  assert.deepEqual(Object.keys(file).sort(), FILE_FIELDS);
  assert.deepEqual([file.filename, file.purpose, file.status, file.expires_at], ["input.jsonl", "batch", "processed", file.created_at + DAY]);
  assert.deepEqual(await client.files.retrieve(file.id), file);
  assert.equal((await client.files.waitForProcessing(file.id, { maxWait: 5000 })).status, "processed");
  assert.equal(await (await client.files.content(file.id)).text(), line("c1", "one"));
  assert.deepEqual(await client.files.delete(file.id), { id: file.id, object: "file", deleted: true });
  await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
  await assert.rejects(client.files.content(file.id), OpenAI.NotFoundError);
});

test("a file from memory needs no name of its own", async () => {
  for (const given of [await toFile(Buffer.from(line("c1", "one"))), new File([line("c1", "one")], "lines")]) {
    const file = await client.files.create({ file: given, purpose: "batch" });
    assert.equal(await (await client.files.content(file.id)).text(), line("c1", "one"));
  }
});

test("a file comes in parts, in the order that is named at the end", async () => {
  const content = line("c1", "one") + line("c2", "two");
  const upload = await client.uploads.create({ bytes: content.length, filename: "in.jsonl", mime_type: "application/jsonl", purpose: "batch" });
  assert.deepEqual(Object.keys(upload).sort(), UPLOAD_FIELDS);
  assert.deepEqual([upload.status, upload.expires_at], ["pending", upload.created_at + 3600]);
  const pieces = [content.slice(50), content.slice(0, 50)];
  const [second, first] = await Promise.all(
    pieces.map(async (piece) => client.uploads.parts.create(upload.id, { data: await toFile(Buffer.from(piece), "piece") })),
  );
  assert.deepEqual([first.object, first.upload_id], ["upload.part", upload.id]);
  const done = await client.uploads.complete(upload.id, { part_ids: [first.id, second.id] });
  assert.deepEqual(Object.keys(done.file).sort(), FILE_FIELDS);
  assert.equal(await (await client.files.content(done.file.id)).text(), content);
  await assert.rejects(client.uploads.cancel(upload.id), OpenAI.BadRequestError);
});

test("a create that is repeated with its idempotency key gives the same object", async () => {
  const file = await client.files.create({ file: await toFile(Buffer.from(line("c1", "one")), "input.jsonl"), purpose: "batch" });
  const body = { input_file_id: file.id, endpoint: CHAT, completion_window: "24h" };
  const options = { headers: { "Idempotency-Key": crypto.randomUUID() } };
  const first = await client.batches.create(body, options);
  const { data, response } = await client.batches.create(body, options).withResponse();
  assert.deepEqual([data, response.headers.get("idempotent-replayed")], [first, "true"]);
  await assert.rejects(client.batches.create({ ...body, metadata: { a: "b" } }, options), OpenAI.UnprocessableEntityError);
  assert.notEqual((await client.batches.create(body)).id, first.id);
});

test("pages follow each other by themselves", async () => {
  const mine = [];
  for (let number = 0; number < 5; number += 1) {
    mine.push((await client.files.create({ file: await toFile(Buffer.from("x"), "x.bin"), purpose: "fine-tune" })).id);
  }
  for (const order of ["asc", "desc"]) {
    const found = [];
    for await (const file of client.files.list({ purpose: "fine-tune", limit: 2, order })) found.push(file.id);
    assert.deepEqual(found.filter((id) => mine.includes(id)), order === "asc" ? mine : mine.toReversed());
  }
  const page = await client.files.list({ purpose: "fine-tune", limit: 3 });
  assert.equal(page.hasNextPage(), true);
  assert.equal((await page.getNextPage()).data[0].id, mine[1]);
});

test("a batch runs to its end", async () => {
  const created = await submit(line("c1", "one") + line("c2", "fail 429") + line("c3", "three"), { metadata: { team: "blue" } });
  assert.deepEqual(Object.keys(created).sort(), BATCH_FIELDS);
  assert.deepEqual([created.status, created.output_file_id, created.errors], ["validating", null, null]);
  const batch = await waitFor(created.id);
  assert.deepEqual(Object.keys(batch).sort(), BATCH_FIELDS);
  assert.deepEqual([batch.status, batch.model, batch.metadata], ["completed", "m", { team: "blue" }]);
  assert.deepEqual(batch.request_counts, { total: 3, completed: 2, failed: 1 });
  assert.equal(batch.usage.total_tokens, batch.usage.input_tokens + batch.usage.output_tokens);
  const done = await results(batch.output_file_id);
  assert.deepEqual(done.map((one) => [one.custom_id, one.response.body.choices[0].message.content]), [["c1", "one"], ["c3", "three"]]);
  assert.ok(done.every((one) => one.error === null && one.response.status_code === 200));
  const [failed] = await results(batch.error_file_id);
  assert.deepEqual([failed.custom_id, failed.response.status_code, failed.error.code], ["c2", 429, "bad_luck"]);
  assert.equal(failed.response.body.error.code, "bad_luck");
  const listed = [];
  for await (const one of client.batches.list({ limit: 5 })) listed.push(one.id);
  assert.ok(listed.includes(batch.id));
});

test("a file with bad lines fails with an entry for each", async () => {
  const batch = await waitFor((await submit(line("c1", "hi") + "{\n" + line("c3", "hi", "nobody"))).id);
  assert.equal(batch.status, "failed");
  assert.deepEqual(batch.errors.data.map(({ code, line: number, param }) => [code, number, param]), [
    ["invalid_json_line", 2, null], ["model_not_found", 3, "body.model"],
  ]);
});

test("a cancelled batch keeps what was finished", async () => {
  const { id } = await submit(line("done", "yes") + line("open", "no", "away"));
  await waitFor(id, (batch) => batch.request_counts.completed === 1);
  assert.ok(["cancelling", "cancelled"].includes((await client.batches.cancel(id)).status));
  const batch = await waitFor(id);
  assert.equal(batch.status, "cancelled");
  assert.deepEqual((await results(batch.output_file_id)).map((one) => one.custom_id), ["done"]);
  const [rest] = await results(batch.error_file_id);
  assert.deepEqual([rest.custom_id, rest.response, rest.error.code], ["open", null, "batch_cancelled"]);
  assert.deepEqual(await client.batches.cancel(id), batch);
});

test("early results are read through the same method", async () => {
  const { id } = await submit(line("done", "yes") + line("open", "no", "away"));
  const running = await waitFor(id, (batch) => batch.output_file_id !== null);
  const answer = await client.files.content(running.output_file_id, { query: { offset: 0 } });
  assert.equal(answer.headers.get("x-incomplete"), "true");
  assert.equal(answer.headers.get("x-last-line"), "1");
  assert.equal(JSON.parse(await answer.text()).custom_id, "done");
  await client.batches.cancel(id);
});

test("errors are of the client's own classes and carry all that the server says", async () => {
  const missing = { completion_window: "24h", endpoint: CHAT };
  await assert.rejects(client.batches.create(missing), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.type, error.param, error.code], ["invalid_request_error", "input_file_id", "missing_required_parameter"]);
    assert.match(error.requestID, /^req_/);
    return true;
  });
  await assert.rejects(client.batches.retrieve("batch_0123456789abcdef01234567"), OpenAI.NotFoundError);
  await assert.rejects(client.batches.list({ limit: 101 }), OpenAI.BadRequestError);
  const ended = await waitFor((await submit(line("c1", "one"))).id);
  await assert.rejects(client.batches.cancel(ended.id), (error) => {
    assert.ok(error instanceof OpenAI.ConflictError);
    assert.equal(error.headers.get("x-should-retry"), "false");
    return true;
  });
});

test("embeddings come as numbers, in the order of the texts", async () => {
  const input = ["ab", "c"];
  const made = await client.embeddings.create({ model: "m", input }); // base64 is what the client asks for
  const plain = await client.embeddings.create({ model: "m", input, encoding_format: "float" });
  for (const { data } of [made, plain]) assert.deepEqual(data.map((item) => Array.from(item.embedding)), [[2, 1], [1, 1]]);
  assert.equal(made.usage.prompt_tokens, 7);
});
