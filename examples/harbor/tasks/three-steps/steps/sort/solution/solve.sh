#!/bin/sh
sort fruits.txt >sorted.txt
